"use strict";
// The graph of a plan: only the visible boxes are laid out, each open frame by itself, and drawn as SVG.

const PAD = 12; // inside frames
const HEAD = 26; // of frames

// The most arrows in one frame: beyond that the lightest are left out, but none that is the heaviest of a box.
const MOST_ARROWS = 220;
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

const ruler = document.createElement("canvas").getContext("2d");

function textWidth(text, size, weight = 400) {
  ruler.font = `${weight} ${size}px ${FONT}`;
  return ruler.measureText(text).width;
}

// The text in so many pixels, with an ellipsis where it is longer.
function clipped(text, width, size, weight = 400) {
  if (textWidth(text, size, weight) <= width) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (textWidth(`${text.slice(0, middle)}…`, size, weight) <= width) low = middle;
    else high = middle - 1;
  }
  return `${text.slice(0, low)}…`;
}

// --- Layout ------------------------------------------------------------------------------------

// The lines of a closed box.
function captions(plan, box) {
  if (box.kind === "op") return [plan.op(box.node), plan.made(box.node)];
  if (box.kind === "kernel") {
    return [shortName(box), `${box.kernel.k} · ${counted(box.ops, "op")} · ${box.time ? `${timeText(box.time)} µs` : "free"}`];
  }
  if (box.nodes) return [box.label, counted(box.ops, "op")];
  return [box.label, `${counted(box.count, "kernel")} · ${timeText(box.time)} µs`];
}

// A kernel's name without its place, where a frame around it says that.
function shortName({ label, kernel, parent }) {
  if (!kernel.place || !label.startsWith(`${kernel.place}:`)) return label;
  for (let frame = parent; frame; frame = frame.parent) {
    if (!frame.gathered && frame.label && `/${kernel.place}`.endsWith(`/${frame.label}`)) return label.slice(kernel.place.length + 1);
  }
  return label;
}

function measureLeaf(plan, box, differs) {
  const [first, second] = captions(plan, box);
  const mark = (differs ? 18 : 0) + (box.canOpen ? 24 : 0);
  const width = Math.max(textWidth(first, 13, 600) + mark, textWidth(second, 11.5) + (differs ? 0 : mark / 2)) + 24;
  box.w = Math.min(Math.max(width, box.kind === "op" ? 84 : 124), 250);
  box.h = box.kind === "op" ? 38 : 48;
}

// Gives every visible box its size and its place in its frame, and every open frame its edges. Returns the number
// of arrows that are left out.
function layOut(plan, differs) {
  const leaf = new Array(plan.size);
  const prepare = (frame) => {
    frame.edges = new Map();
    for (const child of frame.children) {
      if (child.open) prepare(child);
      else child.forEachNode((n) => (leaf[n] = child));
    }
  };
  prepare(plan.root);
  plan.forEachEdge((p, n, v) => {
    let [a, b] = [leaf[p], leaf[n]];
    if (a === b) return;
    // A kernel passes values on chip, others pass through memory.
    const inside = plan.kernelOf[p] === plan.kernelOf[n];
    let [da, db] = [a.depth, b.depth];
    while (da > db) { a = a.parent; da--; }
    while (db > da) { b = b.parent; db--; }
    while (a.parent !== b.parent) { a = a.parent; b = b.parent; }
    const { edges } = a.parent;
    const key = a.id * 2 ** 24 + b.id;
    let edge = edges.get(key);
    if (!edge) edges.set(key, (edge = { from: a, to: b, inside, values: new Set(), bytes: 0 }));
    if (!edge.values.has(v)) {
      edge.values.add(v);
      edge.bytes += plan.bytesOf(v);
    }
  });
  let hidden = 0;
  const thin = (frame) => {
    hidden += keepHeaviest(frame);
    frame.children.forEach((child) => child.open && thin(child));
  };
  thin(plan.root);
  place(plan, plan.root, differs);
  return hidden;
}

// Removes the lightest arrows of a frame that has too many. Returns their number.
function keepHeaviest(frame) {
  if (frame.edges.size <= MOST_ARROWS) return 0;
  const kept = new Map();
  const [into, outOf] = [new Set(), new Set()];
  const sorted = [...frame.edges].sort(([, a], [, b]) => b.bytes - a.bytes);
  for (const [key, edge] of sorted) {
    if (kept.size >= MOST_ARROWS && into.has(edge.to) && outOf.has(edge.from)) continue;
    kept.set(key, edge);
    into.add(edge.to);
    outOf.add(edge.from);
  }
  const removed = frame.edges.size - kept.size;
  frame.edges = kept;
  return removed;
}

function place(plan, frame, differs) {
  for (const child of frame.children) {
    if (child.open) place(plan, child, differs);
    else measureLeaf(plan, child, differs(child));
  }
  const edges = [...frame.edges.values()];
  const joined = new Set(edges.flatMap(({ from, to }) => [from, to]));
  const head = frame.parent ? HEAD : 0;
  let [width, height] = [0, 0];
  if (joined.size) {
    const graph = new dagre.graphlib.Graph();
    graph.setGraph({ rankdir: "TB", nodesep: 22, ranksep: 34, edgesep: 10, ranker: edges.length > 150 ? "longest-path" : "network-simplex" });
    for (const box of frame.children) if (joined.has(box)) graph.setNode(box.id, { width: box.w, height: box.h });
    for (const edge of edges) {
      edge.label = edge.inside ? "" : bytesText(edge.bytes);
      const size = edge.label ? { width: textWidth(edge.label, 11) + 6, height: 14, labelpos: "c" } : {};
      graph.setEdge(edge.from.id, edge.to.id, size);
    }
    dagre.layout(graph);
    ({ width, height } = graph.graph());
    for (const box of joined) {
      const { x, y } = graph.node(box.id);
      box.x = x - box.w / 2 + PAD;
      box.y = y - box.h / 2 + PAD + head;
    }
    for (const edge of edges) {
      const { points, x, y } = graph.edge(edge.from.id, edge.to.id);
      edge.points = points.map((point) => [point.x + PAD, point.y + PAD + head]);
      edge.at = x === undefined ? null : [x + PAD, y + PAD + head];
    }
  }
  // What neither reads nor feeds a sibling stands in rows below.
  const alone = frame.children.filter((box) => !joined.has(box));
  if (alone.length) {
    const widest = Math.max(width, Math.sqrt(alone.reduce((sum, box) => sum + (box.w + 22) * (box.h + 22) * 2, 0)));
    let [x, y, row] = [0, height ? height + 30 : 0, 0];
    for (const box of alone) {
      if (x && x + box.w > widest) { y += row + 22; x = row = 0; }
      [box.x, box.y] = [x + PAD, y + PAD + head];
      x += box.w + 22;
      width = Math.max(width, x - 22);
      row = Math.max(row, box.h);
    }
    height = y + row;
  }
  const title = frame.parent ? textWidth(frameTitle(frame), 12, 600) + 60 : 0;
  frame.w = Math.max(width, title) + 2 * PAD;
  if (title > width) shift(frame, edges, (title - width) / 2);
  frame.h = height + 2 * PAD + head;
}

// Moves what is in a frame to the right.
function shift(frame, edges, by) {
  for (const box of frame.children) box.x += by;
  for (const edge of edges) {
    edge.points = edge.points.map(([x, y]) => [x + by, y]);
    if (edge.at) edge.at[0] += by;
  }
}

function frameTitle(frame) {
  if (frame.kind === "kernel") return `${shortName(frame)} · ${frame.kernel.k} · ${frame.time ? `${timeText(frame.time)} µs` : "free"}`;
  if (frame.nodes) return frame.label;
  return `${frame.label} · ${counted(frame.count, "kernel")} · ${timeText(frame.time)} µs`;
}

// --- Drawing -----------------------------------------------------------------------------------

const LINE = d3.line().curve(d3.curveBasis);

class Pane {
  // One plan's graph with its buttons. `app` is told what is selected; it calls `show` and `mark`.
  constructor(host, app) {
    this.app = app;
    this.element = h("section", { class: "pane" });
    host.append(this.element);
    this.title = h("h3", { class: "pane-title" });
    this.left_out = h("span", { class: "faint left-out" });
    const button = (label, text, act) => h("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
    this.element.append(
      h("div", { class: "pane-head" }, this.title, this.left_out, h("div", { class: "buttons" },
        button("Zoom in", "+", () => this.zoomBy(1.3)),
        button("Zoom out", "−", () => this.zoomBy(1 / 1.3)),
        button("Show the whole graph", "Fit", () => this.fit(true)),
        button("Close all frames", "Collapse", () => this.collapse()))));
    this.svg = d3.create("svg").attr("class", "graph").attr("role", "group").attr("tabindex", -1);
    this.element.append(this.svg.node());
    this.svg.append("defs").append("marker")
      .attr("id", `arrow-${boxes++}`).attr("viewBox", "0 0 8 8").attr("refX", 7).attr("refY", 4)
      .attr("markerWidth", 7).attr("markerHeight", 7).attr("markerUnits", "userSpaceOnUse").attr("orient", "auto")
      .append("path").attr("d", "M0,0.8L7,4L0,7.2z").attr("class", "arrow");
    this.arrow = `url(#${this.svg.select("marker").attr("id")})`;
    this.view = this.svg.append("g");
    this.zoom = d3.zoom().scaleExtent([0.03, 2.5])
      // The wheel alone, and one finger, scroll the page.
      .filter((event) => event.type === "wheel" ? event.ctrlKey || event.metaKey : event.touches ? event.touches.length > 1 : !event.button)
      .on("zoom", ({ transform }) => this.view.attr("transform", transform));
    this.svg.call(this.zoom).on("dblclick.zoom", null);
    this.svg.on("click", (event) => this.clicked(event))
      .on("dblclick", (event) => { const box = this.boxAt(event); if (box?.canOpen) this.toggle(box); })
      .on("keydown", (event) => this.pressed(event))
      .on("focusin", (event) => { const box = this.boxAt(event); if (box) this.focused(box); })
      .on("pointermove", (event) => this.pointed(event))
      .on("pointerleave", () => tip.hide());
  }

  show(plan, other) {
    const fresh = this.plan !== plan;
    [this.plan, this.other] = [plan, other];
    this.compared = other ? plan.compare(other) : null;
    this.title.textContent = `${plan.planner}: ${counted(plan.kernels.length, "kernel")}, ${timeText(plan.time)} µs`;
    this.svg.attr("aria-label", `Graph of the kernels of the ${plan.planner} plan`);
    if (fresh) this.current = null;
    this.draw();
    if (fresh) this.fit(false);
  }

  differs(box) {
    if (!this.compared || box.nodes || box.kind === "op") return 0;
    if (box.kind === "kernel") return this.compared[box.kernel.k].same < 0 ? 1 : 0;
    return box.children.reduce((sum, child) => sum + this.differs(child), 0);
  }

  draw() {
    const { plan } = this;
    const hidden = layOut(plan, (box) => this.differs(box) > 0);
    this.left_out.textContent = hidden ? `${counted(hidden, "lighter arrow")} not drawn` : "";
    this.drawn = [];
    this.elements = new Map();
    this.view.selectChildren().remove();
    if (!plan.kernels.length) {
      this.view.append("text").attr("class", "empty").attr("x", 8).attr("y", 24)
        .text("This plan has no kernels: the results are arguments or constants.");
      return;
    }
    this.overlay = this.view.append("g").attr("class", "overlay");
    this.drawInside(this.view, plan.root, 0, 0);
    if (!this.elements.has(this.current)) this.current = this.drawn[0];
    this.elements.get(this.current).attr("tabindex", 0);
    this.mark();
  }

  drawInside(layer, frame, left, top) {
    const edges = layer.append("g");
    const labels = [];
    for (const edge of frame.edges.values()) {
      const path = edges.append("path").datum(edge).attr("class", edge.inside ? "edge inside" : "edge")
        .attr("d", LINE(edge.points)).attr("marker-end", this.arrow);
      if (!edge.inside) path.style("stroke-width", Math.min(Math.max(Math.log10(edge.bytes + 1) - 3.5, 1), 4.5));
      edge.path = path;
      if (edge.label) labels.push(edge);
    }
    for (const box of frame.children) this.drawBox(layer, box, left, top);
    layer.append("g").attr("class", "edge-labels").selectAll("text").data(labels).join("text")
      .attr("x", (edge) => edge.at[0]).attr("y", (edge) => edge.at[1] + 4).text((edge) => edge.label)
      .each(function (edge) { edge.text = d3.select(this); });
  }

  drawBox(layer, box, left, top) {
    const { plan } = this;
    const [x, y] = [left + box.x, top + box.y];
    const differs = this.differs(box);
    const g = layer.append("g").datum(box).attr("transform", `translate(${box.x},${box.y})`)
      .attr("class", `box ${box.kind}${box.open ? " open" : ""}${differs ? " differs" : ""}`)
      .attr("role", "button").attr("tabindex", -1).attr("aria-label", this.spoken(box, differs));
    if (box.canOpen) g.attr("aria-expanded", box.open);
    box.at = { x, y };
    this.drawn.push(box);
    this.elements.set(box, g);
    const bound = box.kind === "kernel" ? box.kernel.bound : "";
    if (!box.open && box.kind === "frame") {
      g.append("rect").attr("class", "behind").attr("x", 4).attr("y", 4).attr("width", box.w).attr("height", box.h).attr("rx", 6);
    }
    g.append("rect").attr("class", "body").attr("width", box.w).attr("height", box.h).attr("rx", 6);
    const mark = differs ? 16 : 0;
    const lead = mark + (box.canOpen ? 20 : 0);
    if (box.open) {
      g.append("text").attr("class", "head").attr("x", 11).attr("y", 18).text(clipped(frameTitle(box), box.w - 30 - lead, 12, 600));
      this.drawInside(g, box, x, y);
    } else {
      const [first, second] = captions(plan, box);
      if (bound) g.append("rect").attr("class", `edge-of ${bound}`).attr("x", 0).attr("y", 5).attr("width", 4).attr("height", box.h - 10).attr("rx", 2);
      g.append("text").attr("class", "first").attr("x", 12).attr("y", box.kind === "op" ? 16 : 19).text(clipped(first, box.w - 20 - lead, 13, 600));
      g.append("text").attr("class", "second").attr("x", 12).attr("y", box.kind === "op" ? 31 : 35).text(clipped(second, box.w - 20, 11.5));
      this.drawFoot(g, box);
    }
    if (differs) g.append("text").attr("class", "mark").attr("x", box.w - (box.canOpen ? 34 : 14)).attr("y", box.open ? 18 : 19).text("≠");
    if (box.canOpen) {
      const toggle = g.append("g").attr("class", "toggle").attr("transform", `translate(${box.w - 22},${box.open ? 3 : 4})`);
      toggle.append("rect").attr("width", 20).attr("height", 20).attr("rx", 4);
      toggle.append("path").attr("d", box.open ? "M6,8L10,13L14,8" : "M8,6L13,10L8,14");
    }
  }

  // The share of time at the foot of a box, in the colours of what bounds it.
  drawFoot(g, box) {
    if (box.kind === "op" || box.nodes || !box.time) return;
    const whole = box.kind === "kernel" ? this.plan.slowest : this.plan.time;
    let x = 8;
    const room = box.w - 16;
    for (const [bound, ps] of [...box.bounds].sort((a, b) => b[1] - a[1])) {
      const width = (room * ps) / whole;
      if (width >= 0.5) g.append("rect").attr("class", bound).attr("x", x).attr("y", box.h - 7).attr("width", width).attr("height", 3);
      x += width;
    }
  }

  spoken(box, differs) {
    const { plan } = this;
    if (box.kind === "op") return `operation n${box.node}, ${plan.op(box.node)}, ${plan.made(box.node)}`;
    const marks = differs ? `; differs from the ${this.other.planner} plan` : "";
    if (box.kind === "kernel") {
      return `kernel ${box.kernel.k}, ${box.label}, ${counted(box.ops, "operation")}, ${timeText(box.time)} µs, ${box.kernel.bound}${marks}`;
    }
    if (box.nodes) return `operations ${box.label}`;
    return `${box.label}: ${counted(box.count, "kernel")}, ${timeText(box.time)} µs${marks}`;
  }

  // --- What is selected ---

  // Shows the selection. Returns the boxes with operations of a kernel that is selected in the other plan.
  mark() {
    const { plan, app, other } = this;
    if (!plan?.kernels.length) return;
    this.svg.selectAll(".box").classed("selected", false).classed("also", false).classed("near", false).attr("aria-current", null);
    this.svg.selectAll(".edge").classed("near", false);
    this.svg.selectAll(".edge-labels text").classed("near", false);
    this.overlay.selectChildren().remove();
    const { selection } = app;
    if (!selection) return;
    if (selection.plan !== plan) {
      if (selection.k >= 0 && selection.plan === other) {
        const also = selection.plan.compare(plan)[selection.k].parts.map((k) => visibleBox(plan.boxes[k]));
        for (const box of also) this.elements.get(box)?.classed("also", true);
        return also;
      }
      return;
    }
    let box = selection.box;
    if (box?.kind === "op" || !box) {
      box = selection.node >= 0 ? this.drawn.find((b) => b.node === selection.node) : null;
      box ??= visibleBox(plan.boxes[selection.k]);
    }
    const g = this.elements.get(box) ?? this.elements.get(visibleBox(box));
    if (!g) return;
    g.classed("selected", true).attr("aria-current", "true");
    for (const edge of box.parent?.edges?.values() ?? []) {
      if (edge.from !== box && edge.to !== box) continue;
      edge.path.classed("near", true).raise();
      edge.text?.classed("near", true);
    }
    this.drawNeighbours(box);
  }

  // Curves to the boxes of other frames that the selected one exchanges arrays with.
  drawNeighbours(box) {
    const { plan } = this;
    const inside = new Set();
    box.forEachNode((n) => inside.add(n));
    const found = new Map();
    plan.forEachEdge((p, n, v) => {
      const [from, to] = [inside.has(p), inside.has(n)];
      if (from === to || plan.kernelOf[p] === plan.kernelOf[n]) return;
      const far = visibleBox(plan.boxes[plan.kernelOf[from ? n : p]]);
      if (far.parent === box.parent || far === box) return;
      found.set(`${far.id} ${from}`, { far, from });
    });
    for (const { far, from } of found.values()) {
      if (!far.at) continue;
      this.elements.get(far)?.classed("near", true);
      const [a, b] = from ? [box, far] : [far, box];
      const [x1, y1, x2, y2] = [a.at.x + a.w / 2, a.at.y + a.h, b.at.x + b.w / 2, b.at.y];
      const bend = Math.max(Math.abs(y2 - y1) / 2, 40);
      const path = `M${x1},${y1}C${x1},${y1 + bend} ${x2},${y2 - bend} ${x2},${y2}`;
      this.overlay.append("path").attr("class", "edge far").attr("d", path).attr("marker-end", this.arrow);
    }
  }

  // --- What the reader does ---

  boxAt(event) {
    const g = event.target.closest?.(".box");
    return g ? d3.select(g).datum() : null;
  }

  clicked(event) {
    const box = this.boxAt(event);
    if (!box) return;
    this.current = box;
    if (event.target.closest(".toggle")) this.toggle(box);
    else this.app.select({ plan: this.plan, box, k: box.kind === "frame" ? -1 : box.kernel.k, node: box.node }, this);
    this.focus(box);
  }

  toggle(box) {
    const before = this.onScreen(box);
    if (box.open) box.open = false;
    else openBox(box);
    this.current = box;
    this.draw();
    // The box stays where it is on the screen.
    const after = this.onScreen(box);
    const { k } = d3.zoomTransform(this.svg.node());
    this.svg.call(this.zoom.translateBy, (before.x - after.x) / k, (before.y - after.y) / k);
    this.focus(box);
  }

  onScreen(box) {
    const [x, y] = d3.zoomTransform(this.svg.node()).apply([box.at.x + box.w / 2, box.at.y]);
    return { x, y };
  }

  focused(box) {
    if (this.current !== box) this.elements.get(this.current)?.attr("tabindex", -1);
    this.current = box;
    this.elements.get(box).attr("tabindex", 0);
  }

  focus(box) {
    this.elements.get(box)?.node().focus({ preventScroll: true });
  }

  pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const box = this.boxAt(event);
    const { key } = event;
    if (key === "+" || key === "=") this.zoomBy(1.3);
    else if (key === "-") this.zoomBy(1 / 1.3);
    else if (key === "0") this.fit(true);
    else if (!box) return;
    else if (key === "Enter" || key === " ") {
      this.app.select({ plan: this.plan, box, k: box.kind === "frame" ? -1 : box.kernel.k, node: box.node }, this);
      if (key === "Enter" && box.canOpen) this.toggle(box);
    } else if (key === "Escape") {
      const frame = box.open ? box : box.parent;
      if (frame?.parent) this.toggle(frame);
      else this.app.select(null, this);
    } else if (key.startsWith("Arrow")) {
      const next = this.towards(box, key);
      if (next) {
        this.focus(next);
        this.bringIntoView(next);
      }
    } else return;
    event.preventDefault();
  }

  // The nearest box in the direction of an arrow key.
  towards(box, key) {
    const centre = (b) => [b.at.x + b.w / 2, b.at.y + (b.open ? HEAD / 2 : b.h / 2)];
    const [x, y] = centre(box);
    let [best, least] = [null, Infinity];
    for (const other of this.drawn) {
      if (other === box) continue;
      const [dx, dy] = [centre(other)[0] - x, centre(other)[1] - y];
      const [along, across] = { ArrowDown: [dy, dx], ArrowUp: [-dy, dx], ArrowRight: [dx, dy], ArrowLeft: [-dx, dy] }[key];
      const distance = along + 2 * Math.abs(across);
      if (along > 4 && distance < least) [best, least] = [other, distance];
    }
    return best;
  }

  pointed(event) {
    const target = event.target;
    if (target.classList?.contains("edge")) {
      const edge = d3.select(target).datum();
      if (edge) return tip.show(event, this.edgeLines(edge));
    }
    const box = this.boxAt(event);
    if (!box || box.open) return tip.hide();
    tip.show(event, this.boxLines(box));
  }

  edgeLines({ from, to, values, bytes, inside }) {
    const name = (box) => (box.kind === "op" ? `n${box.node}` : box.kind === "kernel" ? `kernel ${box.kernel.k}` : box.label);
    const shown = [...values].slice(0, 5).map((v) => `${this.plan.type(v)}  ${bytesText(this.plan.bytesOf(v))}`);
    if (values.size > 5) shown.push(`and ${values.size - 5} more`);
    return [`${name(from)} → ${name(to)}: ${bytesText(bytes)}${inside ? ", on chip" : ""}`, ...shown];
  }

  boxLines(box) {
    const { plan } = this;
    if (box.kind === "op") {
      return [`n${box.node} ${plan.op(box.node)}`, plan.made(box.node), plan.source(box.node)];
    }
    if (box.kind === "kernel") return kernelLines(plan, box.kernel);
    return [frameTitle(box)];
  }

  collapse() {
    const close = (box) => {
      box.children?.forEach(close);
      if (box.parent) box.open = false;
    };
    close(this.plan.root);
    this.draw();
    this.fit(false);
  }

  // --- Zoom ---

  get size() {
    const { clientWidth, clientHeight } = this.svg.node();
    return [clientWidth, clientHeight];
  }

  zoomBy(factor) { this.svg.call(this.zoom.scaleBy, factor); }

  // The whole graph, or as much of its top as is legible.
  fit(whole) {
    const [width, height] = this.size;
    const { w, h: tall } = this.plan.root;
    if (!width || !w) return;
    let k = Math.min(1.1, width / w, height / tall);
    if (!whole) k = Math.max(k, 0.8);
    const x = w * k <= width ? (width - w * k) / 2 : whole ? 0 : Math.min(0, width / 2 - k * this.centreOfTop());
    const y = tall * k <= height ? (height - tall * k) / 2 : 0;
    this.svg.call(this.zoom.transform, d3.zoomIdentity.translate(x, y).scale(k));
  }

  centreOfTop() {
    const top = this.plan.root.children.reduce((a, b) => (b.y < a.y ? b : a));
    return top.x + top.w / 2;
  }

  // Moves the graph so that the box is in view; legibly if `near`.
  bringIntoView(box, near = false) {
    const transform = d3.zoomTransform(this.svg.node());
    if (near && transform.k < 0.7) {
      this.svg.call(this.zoom.scaleTo, 0.9);
      return this.centre(box);
    }
    if (!this.sees(box)) this.centre(box);
  }

  // Whether the box, or the head of a frame, is in view.
  sees(box) {
    const [width, height] = this.size;
    const transform = d3.zoomTransform(this.svg.node());
    const [left, top] = transform.apply([box.at.x, box.at.y]);
    const [right, bottom] = transform.apply([box.at.x + box.w, box.at.y + (box.open ? HEAD : box.h)]);
    return left >= 0 && top >= 0 && right <= width && bottom <= height;
  }

  centre(box) {
    this.svg.call(this.zoom.translateTo, box.at.x + box.w / 2, box.at.y + Math.min(box.h, this.size[1] / 2) / 2);
  }
}
