"use strict";
// The plans of the page as objects, and the tree of boxes that the graph shows.

const DOC = JSON.parse(document.getElementById("data").textContent);

// The most boxes in one frame: longer lists are gathered into frames of consecutive kernels or operations.
const MOST_BOXES = 60;

// Frames are opened at first while no more boxes than these are visible.
const FIRST_BOXES = 36;

// --- Figures with units -----------------------------------------------------------------------

// Formatters by their number of decimal places: to make one takes longer than to use it.
const FORMATS = [0, 1, 2, 3].map((digits) =>
  new Intl.NumberFormat("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }));

const grouped = (x, digits) => FORMATS[digits].format(x);

const countText = (n) => grouped(n, 0);

// Picoseconds in microseconds, in four or so significant digits.
function timeText(ps) {
  const us = Math.abs(ps) / 1e6;
  return grouped(ps / 1e6, us >= 1000 ? 0 : us >= 100 ? 1 : 2);
}

// A number with a decimal prefix, in three significant digits.
function siText(x) {
  const power = x >= 1 ? Math.min(Math.floor(Math.log10(x) / 3), 5) : 0;
  return `${Number((x / 1000 ** power).toPrecision(3))} ${["", "k", "M", "G", "T", "P"][power]}`;
}

function bytesText(n) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(n) < 1000 || unit === "GB") return unit === "B" ? `${n} B` : `${grouped(n, 1)} ${unit}`;
    n /= 1000;
  }
}

const shareText = (part, whole) => (whole ? grouped((100 * part) / whole, 1) : "");

const counted = (n, noun) => `${countText(n)} ${noun}${n === 1 ? "" : "s"}`;

// The price of another plan: "costs 1.20 µs more and moves 3.1 MB more".
function priceText(extraPs, extraBytes) {
  const time = !extraPs ? "takes as long" : extraPs > 0 ? `costs ${timeText(extraPs)} µs more` : `saves ${timeText(-extraPs)} µs`;
  const moved = !extraBytes ? "moves as many bytes" : `moves ${bytesText(Math.abs(extraBytes))} ${extraBytes > 0 ? "more" : "less"}`;
  return `${time} and ${moved}`;
}

// --- Plans ------------------------------------------------------------------------------------

class Plan {
  // The plan of one planner: kernels, operations, and which arrays pass between them.
  constructor(study, index) {
    const data = study.plans[index];
    this.index = index;
    this.study = study;
    this.data = data;
    this.planner = data.planner;
    this.graph = DOC.graphs[data.graph];
    this.size = this.graph.op.length;
    this.origins = data.origins;
    const { kernels: column } = data;
    let start = 0;
    this.kernels = column.nodes.map((nodes, k) => {
      const parts = [];
      for (let i = 0; i < column.parts[k].length; i += 2) {
        parts.push({ name: DOC.strings[column.parts[k][i]], ps: column.parts[k][i + 1] });
      }
      const time = parts.reduce((sum, part) => sum + part.ps, 0);
      const [matrix, vector, transcendental] = column.flops[k];
      const kernel = {
        k, nodes, parts, time, start, matrix, vector, transcendental,
        cut: column.cut[k],
        flops: matrix + vector + transcendental,
        read: column.read[k],
        write: column.write[k],
        bytes: column.read[k] + column.write[k],
        onchip: column.onchip[k],
        roof: column.roof[k],
      };
      for (const name of ["name", "scope", "place", "backend", "grid", "tile", "skipped", "makes", "bound", "source"]) {
        kernel[name] = DOC.strings[column[name][k]];
      }
      start += time;
      return kernel;
    });
    this.time = start;
    this.slowest = this.kernels.reduce((most, kernel) => Math.max(most, kernel.time), 0);
    this.bytes = this.kernels.reduce((sum, kernel) => sum + kernel.bytes, 0);
    this.kernelOf = new Int32Array(this.size).fill(-1);
    for (const kernel of this.kernels) for (const n of kernel.nodes) this.kernelOf[n] = kernel.k;
    this.producer = new Int32Array(this.graph.type.length).fill(-1);
    this.graph.makes.forEach((values, n) => values.forEach((v) => (this.producer[v] = n)));
    this.results = new Set(this.graph.outputs);
    this.root = buildTree(this);
  }

  op(n) { return DOC.strings[this.graph.op[n]]; }
  scope(n) { return DOC.strings[this.graph.scope[n]]; }
  source(n) { return DOC.strings[this.graph.source[n]]; }
  type(v) { return DOC.strings[DOC.types[this.graph.type[v]][0]]; }
  bytesOf(v) { return DOC.types[this.graph.type[v]][1]; }
  made(n) { return this.graph.makes[n].map((v) => this.type(v)).join(", "); }
  origin(n) { return this.origins ? this.origins[n] : n; }

  // Calls f(producer, consumer, value) for each operand that an operation makes.
  forEachEdge(f) {
    const { reads } = this.graph;
    for (let n = 0; n < reads.length; n++) {
      for (const v of reads[n]) if (this.producer[v] >= 0) f(this.producer[v], n, v);
    }
  }

  // For each kernel, those whose results it reads and those that read its results, with the values.
  get neighbours() {
    if (!this._neighbours) {
      this._neighbours = this.kernels.map(() => ({ before: new Map(), after: new Map(), inputs: new Set() }));
      this.forEachEdge((p, n, v) => {
        const [a, b] = [this.kernelOf[p], this.kernelOf[n]];
        if (a === b) return;
        for (const [map, k] of [[this._neighbours[b].before, a], [this._neighbours[a].after, b]]) {
          if (!map.has(k)) map.set(k, new Set());
          map.get(k).add(v);
        }
      });
      this.graph.reads.forEach((values, n) => {
        for (const v of values) if (this.producer[v] < 0) this._neighbours[this.kernelOf[n]].inputs.add(v);
      });
    }
    return this._neighbours;
  }

  // The bytes of temporaries that are live while each kernel runs.
  get live() {
    if (!this._live) {
      const change = new Float64Array(this.kernels.length + 1);
      for (const [v, first, last] of this.data.live) {
        change[first] += this.bytesOf(v);
        change[last + 1] -= this.bytesOf(v);
      }
      const scratch = new Map(this.data.scratch);
      let now = 0;
      this._live = this.kernels.map((_, k) => (now += change[k]) + (scratch.get(k) ?? 0));
    }
    return this._live;
  }

  // What the kernels of another plan do with the operations of each kernel: `same` is the kernel with the same
  // operations or -1, `parts` are all kernels that have some of them, `scheduled` whether the same kernel has
  // another tile, grid or backend.
  compare(other) {
    this._compared ??= new Map();
    if (!this._compared.has(other)) {
      const byCut = new Map(other.kernels.map((kernel) => [kernel.cut, kernel]));
      const holders = new Map();
      for (let n = 0; n < other.size; n++) {
        const origin = other.origin(n);
        if (!holders.has(origin)) holders.set(origin, new Set());
        holders.get(origin).add(other.kernelOf[n]);
      }
      const compared = this.kernels.map((kernel) => {
        const twin = byCut.get(kernel.cut);
        if (twin) {
          const scheduled = ["tile", "grid", "backend"].some((field) => twin[field] !== kernel[field]);
          return { same: twin.k, parts: [twin.k], scheduled };
        }
        const parts = new Set();
        for (const n of kernel.nodes) for (const k of holders.get(this.origin(n)) ?? []) parts.add(k);
        return { same: -1, parts: [...parts].sort((a, b) => a - b), scheduled: false };
      });
      this._compared.set(other, compared);
    }
    return this._compared.get(other);
  }

  // Operations and kernels that have every word of the query, the closest first.
  find(query, most) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return { found: [], total: 0 };
    this._texts ??= this.graph.op.map((_, n) =>
      `n${n} ${this.op(n)} ${this.made(n)} ${this.scope(n)} ${this.source(n)}`.toLowerCase());
    const found = [];
    const number = words.length === 1 || words[0] === "kernel" ? words.at(-1).match(/^#?(\d+)$/) : null;
    if (number && this.kernels[+number[1]]) found.push({ k: +number[1], node: -1, rank: 0 });
    for (const kernel of this.kernels) {
      const name = kernel.name.toLowerCase();
      if (words.every((word) => name.includes(word)) && kernel.k !== found[0]?.k) {
        found.push({ k: kernel.k, node: -1, rank: name === query.toLowerCase() ? 1 : 3 });
      }
    }
    this._texts.forEach((text, n) => {
      if (!words.every((word) => text.includes(word))) return;
      const exact = words.some((word) => word === `n${n}` || word === this.op(n).toLowerCase());
      found.push({ k: this.kernelOf[n], node: n, rank: words.includes(`n${n}`) ? 0 : exact ? 2 : 4 });
    });
    found.sort((a, b) => a.rank - b.rank);
    return { found: found.slice(0, most), total: found.length };
  }
}

const LOADED = new Map();

function loadPlan(study, index) {
  const key = `${DOC.studies.indexOf(study)} ${index}`;
  if (!LOADED.has(key)) LOADED.set(key, new Plan(study, index));
  return LOADED.get(key);
}

// --- The tree of boxes -------------------------------------------------------------------------

let boxes = 0;

class Box {
  // A frame (of a scope, a function, or consecutive kernels or operations), a kernel, or an operation.
  constructor(kind, label, parent, about = {}) {
    this.id = boxes++;
    this.kind = kind;
    this.label = label;
    this.parent = parent;
    this.children = null;
    this.open = false;
    Object.assign(this, { kernel: null, node: -1, count: 0, time: 0, ops: 0, first: Infinity, last: -1 }, about);
  }

  get depth() { return this.parent ? this.parent.depth + 1 : 0; }

  get canOpen() { return this.kind === "frame" || (this.kind === "kernel" && this.kernel.nodes.length > 0); }

  forEachNode(f) {
    if (this.kind === "op") f(this.node);
    else if (this.kind === "kernel") this.kernel.nodes.forEach(f);
    else if (this.nodes) this.nodes.forEach(f);
    else this.children.forEach((child) => child.forEachNode(f));
  }

  // The kernels in the frame, or the kernel that it is of.
  get kernels() {
    if (this.kind !== "frame" || this.nodes) return [this.kernel];
    return this.children.flatMap((child) => child.kernels);
  }
}

function buildTree(plan) {
  const root = new Box("frame", "", null, { open: true });
  root.children = [];
  const scopes = new Map([["", root]]);
  const frame = (label, parent) => {
    const made = new Box("frame", label, parent);
    made.children = [];
    parent.children.push(made);
    return made;
  };
  const ofScope = (path) => {
    if (!scopes.has(path)) {
      const cut = path.lastIndexOf("/");
      scopes.set(path, frame(path.slice(cut + 1), ofScope(cut < 0 ? "" : path.slice(0, cut))));
    }
    return scopes.get(path);
  };
  plan.boxes = [];
  let run = null; // the frame of consecutive kernels of one function
  for (const kernel of plan.kernels) {
    // `jnp.einsum` names a scope after its subscripts.
    const path = kernel.scope.split("/").filter((name) => name && !/[,>]/.test(name)).join("/");
    let parent = root;
    if (path) {
      parent = ofScope(path);
      run = null;
    } else if (kernel.place) {
      if (run?.label !== kernel.place) run = frame(kernel.place, root);
      parent = run;
    } else {
      run = null;
    }
    const box = new Box("kernel", kernel.name, parent, { kernel });
    parent.children.push(box);
    plan.boxes.push(box);
  }
  tidy(root, (box) => box.kernel.k, "kernels ");
  measureFrame(root);
  openFirst(root);
  return root;
}

// Removes frames around a single box, and gathers long lists into frames.
function tidy(frame, number, word) {
  frame.children = frame.children.map((child) => {
    if (child.kind !== "frame") return child;
    tidy(child, number, word);
    if (child.children.length > 1) return child;
    const [only] = child.children;
    if (only.kind === "frame") only.label = `${child.label}/${only.label}`;
    only.parent = frame;
    return only;
  });
  if (!frame.parent && frame.children.length === 1 && frame.children[0].kind === "frame") frame.children[0].open = true;
  frame.children = gathered(frame.children, frame, number, word);
}

function gathered(children, parent, number, word) {
  const n = children.length;
  if (n <= MOST_BOXES) return children;
  const size = Math.max(Math.ceil(n / MOST_BOXES), Math.ceil(Math.sqrt(n)));
  const frames = [];
  for (let i = 0; i < n; i += size) {
    const frame = new Box("frame", "", parent, { gathered: true, kernel: parent.kernel });
    const part = children.slice(i, i + size);
    part.forEach((child) => (child.parent = frame));
    frame.children = part;
    const numbers = part.flatMap((child) => (child.kind === "frame" ? numbersIn(child, number) : [number(child)]));
    frame.label = `${word}${least(numbers)}–${greatest(numbers)}`;
    frame.children = gathered(part, frame, number, word);
    frames.push(frame);
  }
  return frames;
}

const numbersIn = (frame, number) =>
  frame.children.flatMap((child) => (child.kind === "frame" ? numbersIn(child, number) : [number(child)]));
const least = (numbers) => numbers.reduce((a, b) => Math.min(a, b));
const greatest = (numbers) => numbers.reduce((a, b) => Math.max(a, b));

// Sums over the kernels of each frame.
function measureFrame(box) {
  if (box.kind === "kernel") {
    const { kernel } = box;
    Object.assign(box, { count: 1, time: kernel.time, ops: kernel.nodes.length, first: kernel.k, last: kernel.k });
    box.bounds = new Map([[kernel.bound, kernel.time]]);
    return;
  }
  box.bounds = new Map();
  for (const child of box.children) {
    measureFrame(child);
    box.count += child.count;
    box.time += child.time;
    box.ops += child.ops;
    box.first = Math.min(box.first, child.first);
    box.last = Math.max(box.last, child.last);
    for (const [bound, ps] of child.bounds) box.bounds.set(bound, (box.bounds.get(bound) ?? 0) + ps);
  }
}

// Opens frames, the outermost first, while not too many boxes are visible; and a kernel that is alone.
function openFirst(root) {
  let visible = root.children.length;
  const waiting = [...root.children];
  for (let i = 0; i < waiting.length; i++) {
    const box = waiting[i];
    if (box.kind !== "frame" || visible - 1 + box.children.length > FIRST_BOXES) continue;
    box.open = true;
    visible += box.children.length - 1;
    waiting.push(...box.children);
  }
  if (root.children.length === 1 && root.children[0].kind === "kernel") openBox(root.children[0]);
}

// Opens a frame or a kernel. The boxes of a kernel's operations are made when it is first opened.
function openBox(box) {
  if (!box.canOpen) return;
  box.open = true;
  if (box.children) return;
  const ops = box.kernel.nodes.map((node) => new Box("op", "", box, { kernel: box.kernel, node, ops: 1 }));
  box.children = gathered(ops, box, (op) => op.node, "n");
  const note = (frame) => {
    if (frame.kind !== "frame") return;
    frame.nodes = [];
    frame.children.forEach((child) => { note(child); child.forEachNode((n) => frame.nodes.push(n)); });
    frame.ops = frame.nodes.length;
  };
  box.children.forEach(note);
}

// Opens all that holds the kernel's box, and the kernel itself if an operation is wanted. Returns the box.
function reveal(plan, k, node = -1) {
  let box = plan.boxes[k];
  for (let frame = box.parent; frame; frame = frame.parent) frame.open = true;
  if (node < 0) return box;
  openBox(box);
  for (;;) {
    const next = box.children?.find((child) => {
      let holds = false;
      child.forEachNode((n) => (holds ||= n === node));
      return holds;
    });
    if (!next) return box;
    if (next.kind === "op") return next;
    next.open = true;
    box = next;
  }
}

// The box that shows an operation now: itself, or the outermost closed box around it.
function visibleBox(box) {
  let shown = box;
  for (let frame = box; frame; frame = frame.parent) if (!frame.open) shown = frame;
  return shown;
}
