"use strict";
// What is chosen (program, two plans, selection), and the views that follow it.

const byId = (id) => document.getElementById(id);

const MOST_FOUND = 40;

class App {
  constructor() {
    this.selection = null; // {plan, k, node, box}: a kernel, one of its operations, or with k = -1 a frame
    this.panes = [new Pane(byId("panes"), this), new Pane(byId("panes"), this)];
    this.table = new KernelTable(byId("kernels"), this);
    this.views = [new TimeChart(byId("time"), this), new Roofline(byId("roofline"), this), this.table, new Details(byId("details"), this)];
    this.sideBySide = h("button", { type: "button", "aria-pressed": "false", onclick: () => this.toggleSide() }, "Two graphs");
    byId("differences").after(this.sideBySide);
    byId("bar").addEventListener("submit", (event) => event.preventDefault());
    byId("study").addEventListener("change", (event) => (location.hash = `study-${event.target.value}`));
    byId("plan").addEventListener("change", () => this.choosePlans());
    byId("beside").addEventListener("change", () => this.choosePlans());
    new Search(byId("search"), byId("found"), this);
    byId("study").replaceChildren(...DOC.studies.map(({ name, device }, i) => h("option", { value: i }, `${name} on ${device.name}`)));
    byId("study-label").hidden = DOC.studies.length < 2;
    byId("explorer").hidden = false;
    window.addEventListener("hashchange", () => this.followHash());
    this.chooseStudy(this.studyOfHash() ?? 0);
    let width = innerWidth;
    new ResizeObserver(() => {
      if (innerWidth === width) return;
      width = innerWidth;
      this.resized();
    }).observe(document.documentElement);
  }

  studyOfHash() {
    const found = location.hash.match(/^#study-(\d+)$/);
    return found && DOC.studies[Number(found[1])] ? Number(found[1]) : null;
  }

  followHash() {
    const index = this.studyOfHash();
    if (index === null) return;
    if (DOC.studies[index] !== this.study) this.chooseStudy(index);
    byId(`study-${index}`).scrollIntoView();
  }

  chooseStudy(index) {
    this.study = DOC.studies[index];
    document.querySelectorAll(".study").forEach((section, i) => (section.hidden = i !== index));
    byId("study").value = index;
    const { plans, beside } = this.study;
    const options = () => plans.map(({ planner }, i) => h("option", { value: i }, planner));
    byId("plan").replaceChildren(...options());
    byId("beside").replaceChildren(h("option", { value: -1 }, "no other plan"), ...options());
    byId("beside").parentElement.hidden = plans.length < 2;
    byId("plan").value = plans.length - 1;
    byId("beside").value = beside;
    this.choosePlans();
  }

  choosePlans() {
    const [first, second] = [Number(byId("plan").value), Number(byId("beside").value)];
    this.plan = loadPlan(this.study, first);
    this.other = second >= 0 && second !== first ? loadPlan(this.study, second) : null;
    this.selection = null;
    byId("differences").replaceChildren(...this.differences());
    this.sideBySide.hidden = !this.other;
    this.showPanes();
    for (const view of this.views) view.show(this.plan, this.other);
    showProof(byId("proof"), this.plan);
    showRefusals(byId("refused"), this.plan);
    const { refusals } = this.plan.data;
    byId("kernels-title").textContent = `${this.plan.kernels.length === 1 ? "The kernel" : `The ${counted(this.plan.kernels.length, "kernel")}`} of the ${this.plan.planner} plan`;
    byId("refused-title").textContent = `${counted(refusals.length, "refused fusion")}, by kind`;
  }

  differences() {
    const { plan, other } = this;
    if (!other) return this.study.plans.length > 1 ? ["Choose a second plan to see where the two differ."] : [];
    const compared = plan.compare(other);
    const differing = compared.filter(({ same }) => same < 0).length;
    const scheduled = compared.filter((c) => c.scheduled).length;
    const same = compared.length - differing - scheduled;
    if (!differing) return [`The ${counted(compared.length, "kernel")} of ${plan.planner} and ${other.planner} have the same operations${scheduled ? `; ${countText(scheduled)} with another tile or grid` : ""}.`];
    const whole = compared.length === 1 ? "The kernel" : `${countText(differing)} of the ${counted(compared.length, "kernel")}`;
    const words = [h("b", { class: "mark" }, "≠ "), `${whole} of ${plan.planner} ${differing === 1 ? "is" : "are"} not in ${other.planner}`];
    const are = (n) => `; ${countText(n)} ${n === 1 ? "is" : "are"} the same`;
    if (same) words.push(are(same));
    if (scheduled) words.push(`${are(scheduled)} with another tile or grid`);
    return [...words, "."];
  }

  toggleSide() {
    const pressed = this.sideBySide.getAttribute("aria-pressed") !== "true";
    this.sideBySide.setAttribute("aria-pressed", pressed);
    this.showPanes();
    this.panes.forEach((pane) => pane.plan && !pane.element.hidden && pane.fit(false));
  }

  showPanes() {
    const both = this.other && this.sideBySide.getAttribute("aria-pressed") === "true";
    byId("panes").classList.toggle("two", Boolean(both));
    this.panes[1].element.hidden = !both;
    this.panes[0].show(this.plan, this.other);
    if (both) this.panes[1].show(this.other, this.plan);
  }

  // Selects a kernel, an operation or a frame in all views; `from` is the view in which it was chosen.
  select(selection, from) {
    tip.hide();
    this.selection = selection;
    for (const pane of this.panes) {
      if (pane.element.hidden) continue;
      if (selection && pane !== from && pane.plan === selection.plan && selection.k >= 0) {
        const box = reveal(selection.plan, selection.k, selection.node);
        pane.draw();
        pane.bringIntoView(box, true);
        pane.focused(box);
      }
      const also = pane.mark();
      if (also?.length && !also.some((box) => pane.sees(box))) pane.bringIntoView(also[0], true);
    }
    for (const view of this.views) view.mark();
  }

  resized() {
    for (const view of this.views) view.show(this.plan, this.other);
  }
}

class Search {
  // A field with a list of what it finds in the plan that is shown.
  constructor(field, box, app) {
    Object.assign(this, { field, box, app, at: -1, found: [] });
    field.addEventListener("input", () => this.look());
    field.addEventListener("focus", () => this.look());
    field.addEventListener("blur", () => setTimeout(() => this.close(), 150));
    field.addEventListener("keydown", (event) => this.pressed(event));
    box.addEventListener("pointerdown", (event) => {
      const item = event.target.closest("[data-i]");
      if (item) this.choose(Number(item.dataset.i));
      event.preventDefault();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "/" || event.target.closest?.("input, select, textarea")) return;
      field.focus();
      event.preventDefault();
    });
  }

  look() {
    const { plan } = this.app;
    if (!this.field.value.trim()) return this.close();
    const { found, total } = plan.find(this.field.value, MOST_FOUND);
    [this.found, this.at] = [found, found.length ? 0 : -1];
    const rows = found.map(({ k, node }, i) => h("li", { role: "option", id: `found-${i}`, "data-i": i },
      node < 0
        ? [h("b", {}, `kernel ${k}`), ` ${plan.kernels[k].name}`]
        : [h("b", {}, `n${node} ${plan.op(node)}`), ` ${plan.made(node)} `, h("span", { class: "faint" }, `kernel ${k} ${plan.source(node)}`)]));
    if (!total) rows.push(h("li", { class: "faint" }, "nothing found in this plan"));
    if (total > found.length) rows.push(h("li", { class: "faint" }, `and ${countText(total - found.length)} more`));
    this.box.replaceChildren(...rows);
    this.box.hidden = false;
    this.field.setAttribute("aria-expanded", "true");
    this.point();
  }

  point() {
    [...this.box.querySelectorAll("[data-i]")].forEach((item, i) => {
      item.setAttribute("aria-selected", i === this.at);
      if (i === this.at) item.scrollIntoView({ block: "nearest" });
    });
    if (this.at >= 0) this.field.setAttribute("aria-activedescendant", `found-${this.at}`);
    else this.field.removeAttribute("aria-activedescendant");
  }

  close() {
    this.box.hidden = true;
    this.field.setAttribute("aria-expanded", "false");
    this.field.removeAttribute("aria-activedescendant");
  }

  choose(i) {
    const { k, node } = this.found[i];
    this.close();
    this.app.select({ plan: this.app.plan, k, node }, this);
    this.app.panes[0].element.scrollIntoView({ block: "nearest" });
  }

  pressed(event) {
    const { found } = this;
    if (event.key === "Escape") {
      if (this.box.hidden) this.field.value = "";
      this.close();
    } else if (event.key === "Enter") {
      if (!this.box.hidden && this.at >= 0) this.choose(this.at);
    } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && found.length) {
      if (this.box.hidden) return this.look();
      this.at = (this.at + (event.key === "ArrowDown" ? 1 : -1) + found.length) % found.length;
      this.point();
    } else return;
    event.preventDefault();
  }
}

if (DOC.studies.length) new App();
