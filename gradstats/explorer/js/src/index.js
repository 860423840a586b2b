// Two ways in: a widget of JupyterLab (anywidget calls `render`), and a page that holds its data.
import { mount } from "./explorer.js";

const TRAITS = ["run", "step", "layer", "ratio", "laws", "rules", "beside", "quantity", "from", "to"];
const NAMED = { from: "first", to: "last" }; // "from" is a word of Python's

function ofModel(model) {
  let [asked, own] = [0, false];
  const waiting = new Map();
  model.on("msg:custom", ({ id, found }) => {
    waiting.get(id)?.(found);
    waiting.delete(id);
  });
  return {
    read: () => Object.fromEntries(TRAITS.map((name) => [name, model.get(NAMED[name] ?? name)])),
    write(view) {
      own = true; // a change from here needs no answer
      for (const name of TRAITS) model.set(NAMED[name] ?? name, view[name]);
      model.save_changes();
      own = false;
    },
    watch: (listener) => TRAITS.forEach((name) => model.on(`change:${NAMED[name] ?? name}`, () => own || listener())),
    fit(question) {
      const id = `${asked++}`;
      model.send({ id, ...question });
      return new Promise((answer) => waiting.set(id, answer));
    },
  };
}

const LISTS = ["laws", "rules"];
const NUMBERS = ["step", "ratio", "from", "to"];

/** The view in the address after #, so that a link shows what its sender saw. */
const ofAddress = {
  read() {
    const given = new URLSearchParams(location.hash.slice(1));
    const value = (name) => {
      const text = given.get(name);
      if (text === null) return undefined;
      if (LISTS.includes(name)) return text.split(",").filter(Boolean);
      return NUMBERS.includes(name) ? Number(text) : text;
    };
    return Object.fromEntries(TRAITS.map((name) => [name, value(name)]));
  },
  write(view) {
    const shown = Object.entries(view).filter(([, value]) => value !== null && value !== "");
    history.replaceState(null, "", `#${new URLSearchParams(shown.map(([n, v]) => [n, String(v)]))}`);
  },
  watch: (listener) => addEventListener("hashchange", listener),
};

export default {
  async render({ model, el }) {
    return mount(el, model.get("payload"), ofModel(model));
  },
};

const data = typeof document === "undefined" ? null : document.getElementById("gradstats-explorer-data");
if (data) mount(document.getElementById("gradstats-explorer"), data.textContent, ofAddress);
