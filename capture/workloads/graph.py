"""A graph convolutional network that finds the communities of a generated graph, whose truth is known.

Source: Kipf and Welling 2017, equation 2; Deshpande et al. 2018 for the graph, a stochastic block model whose nodes
have features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture.workloads.config import RunConfig
from capture.workloads.images import Epochs
from capture.workloads.task import Task, check_batch, generator

__all__ = ["GCN", "example", "make_model", "make_task"]

_NODES, _BLOCKS, _FEATURES, _WIDTH = 3000, 6, 256, 128
_DEGREE, _INSIDE = 10, 0.6
"""Mean number of edges of a node, and the share of them that stay in its community, where chance has a sixth."""
_SIGNAL = 0.15
"""Standard deviation of the communities' features, where that of the nodes' is 1."""
_UNSEEN = 5
"""One node in so many is never trained on."""


class GCN(nn.Module):
    """Two graph convolutions and a linear layer.

    Each node has the normalised sum of its neighbours' and its own features before each convolution.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_FEATURES, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.output = nn.Linear(_WIDTH, _BLOCKS)

    def forward(self, features: Tensor, edges: Tensor) -> Tensor:
        """Return the scores of the communities of all nodes.

        Parameters
        ----------
        features : float32 tensor, shape (nodes, 256)
            Features.
        edges : sparse float32 tensor, shape (nodes, nodes)
            Normalised adjacency, with each node its own neighbour.

        Returns
        -------
        tensor, shape (nodes, communities)
            Scores.
        """
        hidden = F.relu(self.first(torch.sparse.mm(edges, features)))
        hidden = F.relu(self.second(torch.sparse.mm(edges, hidden)))
        scores: Tensor = self.output(hidden)
        return scores


def _graph(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, normalised adjacency and communities of a graph."""
    random = generator(seed, 7)
    truth = torch.arange(_NODES) % _BLOCKS
    pairs = _NODES * _DEGREE // 2
    a, b = torch.randint(_NODES, (2, pairs), generator=random)
    # an end drawn at random is inside with chance 1 / _BLOCKS anyhow: these make it _INSIDE in all
    inside = torch.rand(pairs, generator=random) < (_INSIDE - 1 / _BLOCKS) / (1 - 1 / _BLOCKS)
    # to the node of a's community in the same row of six: 3,000 is a multiple of 6, and none falls outside
    b = torch.where(inside, b - b % _BLOCKS + a % _BLOCKS, b)
    self_edges = torch.arange(_NODES)
    # each edge in both directions, and each node to itself
    ends = torch.stack([torch.cat([a, b, self_edges]), torch.cat([b, a, self_edges])])
    # what was drawn twice is one edge
    places = torch.unique(ends, dim=1)
    degrees = torch.bincount(places[0], minlength=_NODES).float()
    # 1 / sqrt(degree · degree): Kipf and Welling's symmetric normalisation
    weights = (degrees[places[0]] * degrees[places[1]]).rsqrt()
    edges = torch.sparse_coo_tensor(
        places, weights, (_NODES, _NODES), check_invariants=True
    ).coalesce()
    centres = _SIGNAL * torch.randn(_BLOCKS, _FEATURES, generator=random)
    return centres[truth] + torch.randn(_NODES, _FEATURES, generator=random), edges, truth


def make_model(config: RunConfig) -> GCN:
    """Build the model of a run."""
    return GCN()


def example(config: RunConfig) -> tuple[Tensor, Tensor]:
    """Return a graph's features and edges."""
    return _graph(config.seed)[:2]


def make_task(config: RunConfig, rank: int) -> Task:
    """Build the model and the graph; a rank's batch is nodes whose communities it is told."""
    features, edges, truth = _graph(config.seed)
    order = torch.randperm(_NODES, generator=generator(config.seed, 8))
    training_nodes, unseen = order[_NODES // _UNSEEN :], order[: _NODES // _UNSEEN]
    size = check_batch(config, len(training_nodes), "nodes")
    epochs = Epochs(len(training_nodes))

    def loss(network: nn.Module, step: int) -> Tensor:
        # the whole graph goes through the network on every rank; the loss is of the rank's nodes
        nodes = training_nodes[epochs.drawn(step, size, rank, config.nproc, config.seed)]
        return F.cross_entropy(network(features, edges)[nodes], truth[nodes])

    def accuracy(network: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            right = network(features, edges)[unseen].argmax(1) == truth[unseen]
        return {"accuracy": float(right.float().mean())}

    return Task(make_model(config), loss, accuracy)
