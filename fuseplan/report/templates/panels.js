"use strict";
// What stands beside and below the graph in words: details, the table of kernels, proof, refusals.

// --- Elements -------------------------------------------------------------------------------------

// An element with attributes (functions are listeners) and children; texts become text nodes, never markup.
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

function swatch(bound) {
  const svg = d3.create("svg").attr("class", "swatch").attr("viewBox", "0 0 10 10").attr("aria-hidden", "true");
  svg.append("rect").attr("width", 10).attr("height", 10).attr("rx", 2).attr("class", bound);
  return svg.node();
}

const tip = {
  element: null,
  // Shows lines of text near the pointer.
  show(event, lines) {
    if (!this.element) {
      this.element = h("div", { class: "tip", role: "tooltip" });
      document.body.append(this.element);
    }
    this.element.replaceChildren(...lines.filter(Boolean).map((line) => h("div", {}, line)));
    this.element.hidden = false;
    const { offsetWidth: w, offsetHeight: t } = this.element;
    const [x, y] = [event.clientX, event.clientY];
    this.element.style.left = `${Math.max(Math.min(x + 14, innerWidth - w - 8), 4)}px`;
    this.element.style.top = `${y + 18 + t > innerHeight ? Math.max(y - t - 12, 4) : y + 18}px`;
  },
  hide() {
    if (this.element) this.element.hidden = true;
  },
};

// One tab stop for all that fits the selector: arrow keys move among them, Enter and space click.
function rove(root, selector) {
  const move = (from, to) => {
    from.setAttribute("tabindex", -1);
    to.setAttribute("tabindex", 0);
    to.focus();
  };
  root.addEventListener("keydown", (event) => {
    const here = event.target.closest(selector);
    if (!here || event.ctrlKey || event.metaKey || event.altKey) return;
    const all = [...root.querySelectorAll(selector)];
    const i = all.indexOf(here);
    const to = { ArrowRight: i + 1, ArrowDown: i + 1, ArrowLeft: i - 1, ArrowUp: i - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to !== undefined) {
      if (all[to]) move(here, all[to]);
    } else if (event.key === "Enter" || event.key === " ") {
      here.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    } else return;
    event.preventDefault();
  });
  root.addEventListener("focusin", (event) => {
    const here = event.target.closest(selector);
    if (!here) return;
    for (const other of root.querySelectorAll(`${selector}[tabindex="0"]`)) if (other !== here) other.setAttribute("tabindex", -1);
    here.setAttribute("tabindex", 0);
  });
}

// --- Details ----------------------------------------------------------------------------------------

const MOST_LISTED = 100;

class Details {
  constructor(host, app) {
    [this.host, this.app] = [host, app];
  }

  show(plan, other) {
    [this.plan, this.other] = [plan, other];
    this.mark();
  }

  mark() {
    const { selection } = this.app;
    const plan = selection?.plan ?? this.plan;
    const content = !selection ? this.ofPlan() : selection.k < 0 ? this.ofFrame(plan, selection.box) : this.ofKernel(plan, plan.kernels[selection.k], selection.node);
    this.host.replaceChildren(...content.flat(Infinity).filter(Boolean));
    this.host.scrollTop = 0;
  }

  link(plan, k, text = `kernel ${k}`) {
    return h("button", { type: "button", class: "link", title: plan.kernels[k].name, onclick: () => this.app.select({ plan, k, node: -1 }, this) }, text);
  }

  links(plan, numbers, most = 6) {
    const shown = numbers.slice(0, most).flatMap((k, i) => [i ? ", " : "", this.link(plan, k, String(k))]);
    return [numbers.length === 1 ? "kernel " : "kernels ", ...shown, numbers.length > most ? ` and ${numbers.length - most} more` : ""];
  }

  ofPlan() {
    const { plan } = this;
    if (!plan.kernels.length) return [h("h3", {}, `The ${plan.planner} plan`), h("p", {}, "It has no kernels: every result is an argument or a constant.")];
    return [
      h("h3", {}, `The ${plan.planner} plan`),
      h("p", { class: "faint" }, "Select a box, a row, a bar or a dot to see its details here."),
      this.bar(this.boundsOf(plan.kernels), plan.time),
      list([
        ["operations", countText(plan.size)],
        ["kernels", countText(plan.kernels.length)],
        ["time", `${timeText(plan.time)} µs`],
        ["memory traffic", bytesText(plan.bytes)],
        ["temporaries", `${bytesText(plan.data.proof.peak)} at the peak`],
        ["proof", plan.data.proof.status],
      ]),
      this.slowest(plan, plan.kernels),
    ];
  }

  ofFrame(plan, box) {
    const { kernels } = box;
    if (box.nodes) {
      return [h("h3", {}, `Operations ${box.label}`), h("p", {}, "of ", this.link(plan, box.kernel.k, `kernel ${box.kernel.k} ${box.kernel.name}`)), this.operations(plan, box.nodes, -1)];
    }
    const bytes = kernels.reduce((sum, kernel) => sum + kernel.bytes, 0);
    return [
      h("h3", {}, box.label),
      list([
        ["kernels", `${countText(box.count)}, from ${box.first} to ${box.last}`],
        ["operations", countText(box.ops)],
        ["time", `${timeText(box.time)} µs, ${shareText(box.time, plan.time)} % of the plan`],
        ["memory traffic", bytesText(bytes)],
      ]),
      this.bar(this.boundsOf(kernels), box.time),
      this.slowest(plan, kernels),
    ];
  }

  slowest(plan, kernels) {
    const most = [...kernels].sort((a, b) => b.time - a.time).slice(0, 8);
    return [
      h("h4", {}, most.length < kernels.length ? "The slowest kernels" : "Kernels"),
      h("table", { class: "small" }, h("tbody", {}, most.map((kernel) => h("tr", {},
        h("td", { class: "n" }, String(kernel.k)), h("td", { class: "name" }, this.link(plan, kernel.k, kernel.name)),
        h("td", { class: "n" }, timeText(kernel.time)), h("td", { class: "n" }, `${shareText(kernel.time, plan.time)} %`))))),
    ];
  }

  boundsOf(kernels) {
    const sums = new Map();
    for (const { bound, time } of kernels) sums.set(bound, (sums.get(bound) ?? 0) + time);
    return [...sums].filter(([, ps]) => ps).map(([name, ps]) => ({ name, ps }));
  }

  // A stacked bar of parts, with the parts in words.
  bar(parts, whole) {
    if (!whole) return null;
    const sorted = [...parts].sort((a, b) => b.ps - a.ps);
    const svg = d3.create("svg").attr("class", "parts").attr("viewBox", "0 0 100 6").attr("preserveAspectRatio", "none").attr("aria-hidden", "true");
    let x = 0;
    for (const { name, ps } of sorted) {
      svg.append("rect").attr("class", name).attr("x", x).attr("width", (100 * ps) / whole).attr("height", 6);
      x += (100 * ps) / whole;
    }
    return [svg.node(), h("ul", { class: "key" }, sorted.map(({ name, ps }) => h("li", {}, swatch(name), `${name} ${timeText(ps)} µs, ${shareText(ps, whole)} %`)))];
  }

  ofKernel(plan, kernel, node) {
    const { device } = plan.study;
    const flops = [["matrix", kernel.matrix], ["vector", kernel.vector], ["transcendental", kernel.transcendental]];
    const place = [...new Set(kernel.nodes.map((n) => plan.scope(n)).filter(Boolean))];
    const other = plan === this.plan ? this.other : this.plan;
    return [
      h("h3", {}, `${kernel.k} ${kernel.name}`),
      plan !== this.plan ? h("p", { class: "faint" }, `of the ${plan.planner} plan`) : null,
      node >= 0 ? this.ofOperation(plan, node) : null,
      this.bar(kernel.parts, kernel.time),
      list([
        ["time", kernel.time ? `${timeText(kernel.time)} µs, ${shareText(kernel.time, plan.time)} % of the plan` : "none: it is free"],
        ["runs as", kernel.backend],
        ["grid", kernel.grid],
        ["tile", kernel.tile],
        ["skipped tiles", kernel.skipped],
        ["makes", kernel.makes],
        ["reads", bytesText(kernel.read)],
        ["writes", bytesText(kernel.write)],
        ["on chip", kernel.onchip ? `${bytesText(kernel.onchip)} of ${bytesText(device.onchip)}` : ""],
        ["live memory", this.live(plan, kernel)],
        ["arithmetic", flops.filter(([, n]) => n).map(([name, n]) => `${siText(n)}flop ${name}`).join(", ")],
        ["intensity", kernel.flops && kernel.bytes ? `${Number((kernel.flops / kernel.bytes).toPrecision(3))} flop/byte` : ""],
        ["of the roofline", kernel.roof === null ? "" : `${Math.round(kernel.roof / 10)} %`],
        ["scopes", place.slice(0, 4).join(", ") + (place.length > 4 ? `, and ${place.length - 4} more` : "")],
        ["source", kernel.source],
      ]),
      other && other !== plan ? this.inOther(plan, kernel, other) : null,
      this.alternatives(plan, kernel),
      this.exchanges(plan, kernel),
      h("h4", {}, counted(kernel.nodes.length, "operation")),
      this.operations(plan, kernel.nodes, node),
    ];
  }

  // The temporaries that are live while the kernel runs.
  live(plan, { k }) {
    const live = plan.data.live.filter(([, first, last]) => first <= k && k <= last);
    return live.length ? `${bytesText(plan.live[k])} in ${counted(live.length, "temporary array")}` : "";
  }

  ofOperation(plan, n) {
    return h("div", { class: "operation" }, h("b", {}, `n${n} ${plan.op(n)}`), list([
      ["makes", plan.made(n)],
      ["reads", plan.graph.reads[n].map((v) => (plan.producer[v] >= 0 ? `n${plan.producer[v]} ${plan.type(v)}` : `argument ${plan.type(v)}`)).join(", ")],
      ["scope", plan.scope(n)],
      ["source", plan.source(n)],
    ]));
  }

  inOther(plan, kernel, other) {
    const { same, parts, scheduled } = plan.compare(other)[kernel.k];
    if (same >= 0) {
      const twin = other.kernels[same];
      const how = scheduled ? `, with ${twin.tile ? `tile ${twin.tile}` : `grid ${twin.grid}`} and in ${timeText(twin.time)} µs` : "";
      return h("p", {}, `The ${other.planner} plan has the same operations in `, this.link(other, same), `${how}.`);
    }
    return h("p", {}, h("b", { class: "mark" }, "≠ "), parts.length
      ? [`In the ${other.planner} plan these operations are in `, this.links(other, parts), "."]
      : `The ${other.planner} plan has none of these operations: it is of a rewritten program.`);
  }

  // Why the kernel ends where it does, and the best of the other cuts.
  alternatives(plan, kernel) {
    const { reasons, cuts } = plan.data;
    if (!reasons) {
      const limit = document.getElementById("explorer").dataset.explained;
      return [h("h4", {}, "Neighbours"), h("p", { class: "faint" }, `Reasons and other cuts were left out of this page, which has them for the last plan of each program, and for others where there is room, up to ${limit} kernels. Plan.explain gives them for any two operations.`)];
    }
    const rows = [];
    let best = null;
    const offer = (ps, bytes, text) => {
      if (ps !== null && (!best || ps < best.ps || (ps === best.ps && bytes < best.bytes))) best = { ps, bytes, text };
    };
    for (const [producer, consumers, reason, ps, bytes] of reasons) {
      if (producer !== kernel.k && !consumers.includes(kernel.k)) continue;
      const others = producer === kernel.k ? consumers : [producer];
      rows.push(h("li", {}, producer === kernel.k ? "before " : "after ", this.links(plan, others, 4), `: ${DOC.strings[reason]}.`));
      offer(ps, bytes, ["one kernel with ", this.links(plan, others.slice(0, 1))]);
    }
    for (const [k, n, ps, bytes, count] of cuts ?? []) {
      if (k === kernel.k) offer(ps, bytes, [`a cut before n${n} ${plan.op(n)}, in ${counted(count, "kernel")},`]);
    }
    const last = best
      ? h("p", {}, "The best other cut: ", best.text, ` ${priceText(best.ps, best.bytes)}.`)
      : h("p", {}, kernel.nodes.length > 1 && !cuts ? "Cuts through the kernels of this plan are too many to be priced here." : "No other cut is possible.");
    return [h("h4", {}, "Neighbours"), rows.length ? h("ul", { class: "reasons" }, rows) : h("p", { class: "faint" }, "It exchanges no array with another kernel."), last];
  }

  exchanges(plan, kernel) {
    const { before, after, inputs } = plan.neighbours[kernel.k];
    const rows = [];
    const array = (v) => [h("td", { class: "mono" }, plan.type(v)), h("td", { class: "n" }, bytesText(plan.bytesOf(v)))];
    for (const v of inputs) rows.push(h("tr", {}, h("td", {}, "reads an argument"), array(v)));
    for (const [k, values] of before) for (const v of values) rows.push(h("tr", {}, h("td", {}, "reads from ", this.link(plan, k)), array(v)));
    for (const [k, values] of after) for (const v of values) rows.push(h("tr", {}, h("td", {}, "is read by ", this.link(plan, k)), array(v)));
    for (const n of kernel.nodes) for (const v of plan.graph.makes[n]) if (plan.results.has(v)) rows.push(h("tr", {}, h("td", {}, "writes a result"), array(v)));
    if (!rows.length) return null;
    const more = rows.length - MOST_LISTED;
    return [h("h4", {}, "Arrays"), h("table", { class: "small" }, h("tbody", {}, rows.slice(0, MOST_LISTED))), more > 0 ? h("p", { class: "faint" }, `and ${countText(more)} more`) : null];
  }

  operations(plan, nodes, chosen) {
    const at = Math.max(nodes.indexOf(chosen) - MOST_LISTED / 2, 0);
    const shown = nodes.length > MOST_LISTED ? nodes.slice(at, at + MOST_LISTED) : nodes;
    const rows = shown.map((n) => h("tr", { class: n === chosen ? "chosen" : null },
      h("td", { class: "n" }, `n${n}`),
      h("td", {}, h("button", { type: "button", class: "link", onclick: () => this.app.select({ plan, k: plan.kernelOf[n], node: n }, this) }, plan.op(n))),
      h("td", { class: "mono" }, plan.made(n)),
      h("td", { class: "source" }, plan.source(n))));
    const more = nodes.length - shown.length;
    return [h("div", { class: "scroll" }, h("table", { class: "small" }, h("tbody", {}, rows))), more ? h("p", { class: "faint" }, `and ${countText(more)} more`) : null];
  }
}

// A list of names and texts; entries without text are left out.
function list(entries) {
  return h("dl", {}, entries.filter(([, text]) => text).flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]));
}

// --- The table of kernels ------------------------------------------------------------------------------

const ROW_PX = 28;

// Up to so many kernels, all rows are elements: the browser's own search finds them.
const MOST_ROWS = 200;

const COLLATOR = new Intl.Collator("en", { numeric: true });

const COLUMNS = [
  { name: "#", number: true, value: (kernel) => kernel.k },
  { name: "kernel", value: (kernel) => kernel.name, mono: true },
  { name: "ops", number: true, value: (kernel) => kernel.nodes.length },
  { name: "makes", value: (kernel) => kernel.makes, mono: true },
  { name: "µs", number: true, value: (kernel) => kernel.time, text: (kernel) => timeText(kernel.time) },
  { name: "%", number: true, value: (kernel) => kernel.time, text: (kernel, plan) => shareText(kernel.time, plan.time) },
  { name: "bound by", value: (kernel) => kernel.bound, dot: true },
  { name: "memory MB", number: true, value: (kernel) => kernel.bytes, text: (kernel) => grouped(kernel.bytes / 1e6, 2) },
  { name: "flop/B", number: true, value: (kernel) => (kernel.bytes ? kernel.flops / kernel.bytes : -1), text: (kernel) => (kernel.bytes ? grouped(kernel.flops / kernel.bytes, 2) : "") },
  { name: "% of roof", number: true, value: (kernel) => kernel.roof ?? -1, text: (kernel) => (kernel.roof === null ? "" : String(Math.round(kernel.roof / 10))) },
  { name: "grid", value: (kernel) => kernel.grid },
  { name: "tile", value: (kernel) => kernel.tile + (kernel.skipped ? `, ${kernel.skipped} skipped` : "") },
  { name: "on chip", number: true, value: (kernel) => kernel.onchip, text: (kernel) => (kernel.onchip ? bytesText(kernel.onchip) : "") },
  { name: "source", value: (kernel) => kernel.source, mono: true },
];

class KernelTable {
  // Of many rows only those in view are elements: a plan may have ten thousand kernels.
  constructor(host, app) {
    [this.host, this.app] = [host, app];
    this.sort = { column: COLUMNS[0], down: false };
    this.head = h("tr", {});
    this.body = h("tbody", {});
    this.only = h("input", { type: "checkbox", onchange: () => this.order() });
    this.filter = h("label", { class: "filter", hidden: true }, this.only, h("span", {}));
    this.table = h("table", { class: "kernels", "aria-label": "Kernels" }, h("thead", {}, this.head), this.body);
    this.scroller = h("div", { class: "scroll tall", role: "region", "aria-label": "Kernels", tabindex: 0, onscroll: () => this.fill() }, this.table);
    host.append(this.filter, this.scroller);
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest("tr[data-k]");
      if (row) this.app.select({ plan: this.plan, k: Number(row.dataset.k), node: -1 }, this);
    });
    this.body.addEventListener("keydown", (event) => this.pressed(event));
  }

  show(plan, other) {
    [this.plan, this.other] = [plan, other];
    this.compared = other ? plan.compare(other) : null;
    const changed = this.compared?.filter(({ same }) => same < 0).length ?? 0;
    this.filter.hidden = !changed;
    this.filter.lastChild.textContent = ` only kernels that differ from the ${other?.planner} plan (${countText(changed)})`;
    if (!changed) this.only.checked = false;
    this.columns = [...COLUMNS];
    if (other) {
      this.columns.splice(2, 0, {
        name: `in ${other.planner}`,
        value: (kernel) => (this.compared[kernel.k].same < 0 ? -1 - this.compared[kernel.k].parts.length : this.compared[kernel.k].same),
        text: (kernel) => {
          const { same, parts, scheduled } = this.compared[kernel.k];
          if (same >= 0) return `= ${same}${scheduled ? ", other tile" : ""}`;
          return `≠ ${parts.length ? parts.slice(0, 3).join(", ") : "none"}${parts.length > 3 ? ` +${parts.length - 3}` : ""}`;
        },
      });
    }
    // A table of rows that come and go keeps its widths.
    this.head.replaceChildren(...this.columns.map((column) => h("th", { scope: "col", class: column.number ? "n" : null },
      h("button", { type: "button", class: "sort", onclick: () => this.sortBy(column) }, column.name))));
    if (!this.columns.some(({ name }) => name === this.sort.column.name)) this.sort = { column: COLUMNS[0], down: false };
    this.order();
  }

  sortBy(column) {
    this.sort = { column, down: this.sort.column.name === column.name ? !this.sort.down : Boolean(column.number && column.name !== "#") };
    this.order();
  }

  order() {
    const { column, down } = this.sort;
    const rows = this.plan.kernels.filter((kernel) => !this.only.checked || this.compared[kernel.k].same < 0);
    const keyed = rows.map((kernel) => [column.value(kernel), kernel]);
    keyed.sort(([a, first], [b, second]) => {
      const order = typeof a === "string" ? COLLATOR.compare(a, b) : a - b;
      return (down ? -order : order) || first.k - second.k;
    });
    this.rows = keyed.map(([, kernel]) => kernel);
    [...this.head.children].forEach((cell, i) => {
      if (this.columns[i].name === column.name) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    this.table.setAttribute("aria-rowcount", this.rows.length + 1);
    this.range = null;
    this.fill();
    this.keepWidths();
  }

  // Fixes the columns at the widths that the longest texts need.
  keepWidths() {
    const longest = this.columns.map((column) => {
      let [most, found] = [-1, null];
      for (const kernel of this.rows) {
        const { length } = this.text(column, kernel);
        if (length > most) [most, found] = [length, kernel];
      }
      return found;
    });
    this.head.querySelectorAll("th").forEach((cell, i) => {
      const column = this.columns[i];
      const text = longest[i] ? this.text(column, longest[i]) : "";
      const width = Math.max(textWidth(column.name, 14) + 14, textWidth(text, column.mono ? 14.6 : 14.2)) + (column.dot ? 14 : 0);
      cell.style.minWidth = `${Math.min(Math.ceil(width), 340)}px`;
    });
  }

  text(column, kernel) {
    return String(column.text ? column.text(kernel, this.plan) : column.value(kernel));
  }

  fill() {
    const { scroller, rows } = this;
    const all = rows.length <= MOST_ROWS;
    const first = all ? 0 : Math.max(Math.floor(scroller.scrollTop / ROW_PX) - 8, 0);
    const last = all ? rows.length : Math.min(first + Math.ceil((scroller.clientHeight || 480) / ROW_PX) + 16, rows.length);
    if (this.range?.[0] === first && this.range?.[1] === last) return;
    this.range = [first, last];
    const spacer = (n) => (n ? h("tr", { class: "spacer", "aria-hidden": "true", style: `height:${n * ROW_PX}px` }, h("td", { colspan: this.columns.length })) : null);
    const focused = document.activeElement?.closest?.("tr[data-k]")?.dataset.k;
    const made = rows.slice(first, last).map((kernel, i) => h("tr", { "data-k": kernel.k, tabindex: -1, "aria-rowindex": first + i + 2 },
      this.columns.map((column) => {
        const text = this.text(column, kernel);
        const differs = column.name.startsWith("in ") && text.startsWith("≠");
        return h(column.name === "kernel" ? "th" : "td", {
          class: [column.number ? "n" : "", column.mono ? "mono" : "", differs ? "mark" : ""].join(" ").trim() || null,
          scope: column.name === "kernel" ? "row" : null, title: text.length > 30 ? text : null,
        }, column.dot && text !== "free" ? swatch(text) : null, text);
      })));
    this.body.replaceChildren(...[spacer(first), ...made, spacer(rows.length - last)].filter(Boolean));
    if (focused !== undefined) this.body.querySelector(`tr[data-k="${focused}"]`)?.focus({ preventScroll: true });
    this.mark(false);
  }

  mark(scroll = true) {
    const { selection } = this.app;
    const chosen = new Set(selection?.plan !== this.plan ? [] : selection.k >= 0 ? [selection.k] : selection.box.kernels.map((kernel) => kernel.k));
    if (scroll && selection?.k >= 0 && chosen.size) {
      const i = this.rows.findIndex((kernel) => kernel.k === selection.k);
      const [top, height] = [i * ROW_PX, this.scroller.clientHeight - 2 * ROW_PX];
      if (i >= 0 && (top < this.scroller.scrollTop || top > this.scroller.scrollTop + height - ROW_PX)) {
        this.scroller.scrollTop = Math.max(top - height / 2, 0);
        this.fill();
      }
    }
    const rows = [...this.body.querySelectorAll("tr[data-k]")];
    for (const row of rows) {
      const is = chosen.has(Number(row.dataset.k));
      row.classList.toggle("selected", is);
      if (is) row.setAttribute("aria-selected", "true");
      else row.removeAttribute("aria-selected");
      row.setAttribute("tabindex", -1);
    }
    (rows.find((row) => row.classList.contains("selected")) ?? rows[0])?.setAttribute("tabindex", 0);
  }

  pressed(event) {
    const row = event.target.closest("tr[data-k]");
    if (!row) return;
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12, Enter: 0, " ": 0 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const i = this.rows.findIndex((kernel) => kernel.k === Number(row.dataset.k)) + step;
    const kernel = this.rows[Math.min(Math.max(i, 0), this.rows.length - 1)];
    this.app.select({ plan: this.plan, k: kernel.k, node: -1 }, this);
    this.body.querySelector(`tr[data-k="${kernel.k}"]`)?.focus({ preventScroll: true });
  }
}

// --- Proof and refusals ----------------------------------------------------------------------------------

function showProof(host, plan) {
  const { proof } = plan.data;
  const known = proof.bound !== null;
  const parts = proof.parts.slice(0, 12);
  const more = proof.parts.length - parts.length;
  const gap = proof.gap === null ? "" : proof.gap === 0 ? "0" : `${grouped(100 * proof.gap, proof.gap < 0.1 ? 2 : 1)} %`;
  const seconds = proof.seconds.reduce((sum, [, s]) => sum + s, 0);
  const took = (s) => (s < 0.1 ? `${Math.round(1000 * s)} ms` : `${grouped(s, s < 10 ? 2 : 0)} s`);
  const share = known && plan.time ? Math.min(proof.bound / plan.time, 1) : 0;
  const meter = d3.create("svg").attr("class", "parts").attr("viewBox", "0 0 100 6").attr("preserveAspectRatio", "none").attr("aria-hidden", "true");
  meter.append("rect").attr("class", "proven").attr("width", 100 * share).attr("height", 6);
  meter.append("rect").attr("class", "open").attr("x", 100 * share).attr("width", 100 - 100 * share).attr("height", 6);
  host.replaceChildren(...[
    h("p", {}, h("b", {}, `${plan.planner}: ${proof.status}`)),
    known ? meter.node() : null,
    list([
      ["this plan", `${grouped(plan.time / 1e6, 3)} µs`],
      ["lower bound", known ? `${grouped(proof.bound / 1e6, 3)} µs: no plan in the ${plan.planner} planner's space is faster` : `none: the ${plan.planner} planner proves nothing`],
      ["gap", gap],
      ["objective", "modelled time, then memory traffic, then the number of kernels"],
      ["problem", proof.components ? `${counted(plan.size, "operation")} in ${counted(proof.components, "component")}, ${countText(proof.distinct)} of them distinct; ${counted(proof.candidates, "candidate group")}` : counted(plan.size, "operation")],
      ["equally fast", proof.certified ? `the plan of ${proof.certified}, a simpler planner` : ""],
      ["planning", seconds ? `${took(seconds)}: ${proof.seconds.filter(([, s]) => s >= 0.001).map(([name, s]) => `${name} ${took(s)}`).join(", ")}` : ""],
    ]),
    parts.length ? h("h4", {}, "Bounds of components") : null,
    parts.length ? h("div", { class: "scroll" }, componentTable(parts)) : null,
    more > 0 ? h("p", { class: "faint" }, `and ${countText(more)} kinds of components with smaller bounds`) : null,
    proof.joint !== null ? h("p", {}, `Several components are bound together: ${timeText(proof.joint)} µs.`) : null,
  ].filter(Boolean));
}

// Columns without any figure are left out.
function componentTable(parts) {
  const columns = [
    ["bound of each, µs", ([bound]) => timeText(bound)],
    ["components", ([, count]) => countText(count)],
    ["operations in each", ([, , size]) => (size ? countText(size) : "")],
    ["cases", ([, , , cases]) => (cases ? countText(cases) : "")],
  ].filter(([, text]) => parts.some(text));
  return h("table", { class: "small narrow" },
    h("thead", {}, h("tr", {}, columns.map(([name]) => h("th", { scope: "col", class: "n" }, name)))),
    h("tbody", {}, parts.map((part) => h("tr", {}, columns.map(([, text]) => h("td", { class: "n" }, text(part)))))));
}

function showRefusals(host, plan) {
  const { refusals } = plan.data;
  if (!refusals.length) {
    host.replaceChildren(h("p", {}, "None: every edge between operations may lie inside a kernel."));
    return;
  }
  const named = (nodes) => nodes.slice(0, 3).map((n) => `n${n} ${plan.op(n)}`).join(", ") + (nodes.length > 3 ? " and more" : "");
  host.replaceChildren(h("div", { class: "scroll tall", role: "region", "aria-label": "Refused fusions", tabindex: 0 }, h("table", {},
    h("thead", {}, h("tr", {}, ["rule", "reason", "such as"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, refusals.map(([rule, reason, nodes]) => h("tr", {}, h("th", { scope: "row", class: "nowrap" }, DOC.strings[rule]),
      h("td", { class: "wide" }, DOC.strings[reason]), h("td", { class: "mono" }, named(nodes))))))));
}
