"""The user who called sudo, as whom ranks run: namespaces take root, training does not."""

from __future__ import annotations

import grp
import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from gradstats.errors import InputError

__all__ = ["User", "become", "caller"]


@dataclass(frozen=True, slots=True)
class User:
    """A user of this machine.

    Attributes
    ----------
    name : str
        Name in the list of users.
    uid : int
        Number of the user.
    gid : int
        Number of the group.
    home : str
        Home directory.
    """

    name: str
    uid: int
    gid: int
    home: str


def caller() -> User | None:
    """Return the user who called sudo, as sudo says in the environment.

    Returns
    -------
    User or None
        The user. None where nobody called sudo, or root did: a login of root's, or of a container, has no other user to
        go back to, and one such as ``nobody`` could not read root's files.

    Raises
    ------
    InputError
        If the environment names a user whom this machine does not have.
    """
    uid, gid = (os.environ.get(name) for name in ("SUDO_UID", "SUDO_GID"))
    if uid is None or uid == "0":
        return None
    try:
        entry = pwd.getpwuid(int(uid))
        group = entry.pw_gid if gid is None else grp.getgrgid(int(gid)).gr_gid
    except (KeyError, ValueError, OverflowError):
        raise InputError(
            f"ranks run as the user who called sudo, and this machine has no user {uid} with a group {gid}: "
            "unset SUDO_UID to stay root"
        ) from None
    return User(entry.pw_name, entry.pw_uid, group, entry.pw_dir)


def become(user: User) -> None:
    """Give up root in a rank, in all of its threads and for good.

    Parameters
    ----------
    user : User
        Whose the process is from now on, with all groups of the user's.
    """
    # A rank that fails says why in a file of torchrun's, below folders that root alone may enter: an open folder needs
    # no way to it.
    report = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    folder = os.open(report.parent, os.O_PATH)
    os.chown(report.parent, user.uid, user.gid)
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"/proc/self/fd/{folder}/{report.name}"
    # groups first and the user last, who may not change them; the saved numbers, too, or there is a way back
    os.initgroups(user.name, user.gid)
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    # caches are in the home directory, and sudo may have left root's
    os.environ |= {"HOME": user.home, "USER": user.name, "LOGNAME": user.name}
