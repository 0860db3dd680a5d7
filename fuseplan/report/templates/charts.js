"use strict";
// The charts beside the graph: the kernels in time with the live temporaries below, and the roofline.

// The most kernels of a plan that are dots of a roofline; the slowest are shown.
const MOST_DOTS = 1500;

// Kernels narrower than this in the strip share a bar with the next ones.
const NARROWEST_PX = 0.8;

function kernelLines(plan, kernel) {
  const parts = [...kernel.parts].sort((a, b) => b.ps - a.ps).map(({ name, ps }) => `${name} ${timeText(ps)}`);
  return [
    `${kernel.k} ${kernel.name}`,
    `${timeText(kernel.time)} µs${parts.length ? `: ${parts.join(" + ")}` : ", free"}`,
    `${bytesText(kernel.bytes)} through memory, ${counted(kernel.nodes.length, "operation")}`,
  ];
}

// --- Time and memory ----------------------------------------------------------------------------

class TimeChart {
  constructor(host, app) {
    [this.host, this.app] = [host, app];
    this.key = h("ul", { class: "key", "aria-label": "Colours" });
    this.svg = d3.create("svg").attr("class", "chart").attr("role", "group").attr("aria-label", "Kernels in time");
    this.caption = h("p", { class: "caption" });
    host.append(this.svg.node(), this.key, this.caption);
    rove(this.svg.node(), ".bar");
  }

  show(plan, other) {
    [this.plan, this.other] = [plan, other];
    const width = this.host.clientWidth;
    if (!width) return;
    const { svg } = this;
    svg.selectChildren().remove();
    const plans = other ? [other, plan] : [plan];
    const left = 58;
    const longest = Math.max(...plans.map((p) => p.time)) || 1;
    this.x = d3.scaleLinear([0, longest], [left, width - 14]);
    let y = 0;
    this.bars = new Map();
    for (const p of plans) {
      svg.append("text").attr("class", "label").attr("x", left).attr("y", y + 13)
        .text(`${p.planner}: ${counted(p.kernels.length, "kernel")}, ${timeText(p.time)} µs`);
      this.drawBars(p, y + 19);
      y += 58;
    }
    this.rows = plans.map((p, i) => ({ plan: p, top: 19 + 58 * i, height: 30 }));
    y = this.drawMemory(y + 2, left);
    const ticks = this.x.ticks(width < 500 ? 4 : 8);
    const step = (ticks[1] ?? longest) / 1e6 - ticks[0] / 1e6;
    const digits = step < 0.1 ? 2 : step < 1 ? 1 : 0;
    svg.append("g").attr("class", "axis").attr("transform", `translate(0,${y})`)
      .call(d3.axisBottom(this.x).tickValues(ticks).tickFormat((ps) => grouped(ps / 1e6, ps ? digits : 0)).tickSizeOuter(0));
    svg.append("text").attr("class", "label").attr("x", 0).attr("y", y + 17).text("µs");
    svg.attr("width", width).attr("height", y + 24).attr("viewBox", `0 0 ${width} ${y + 24}`);
    svg.select(".bar").attr("tabindex", 0);
    const bounds = new Set(plans.flatMap((p) => p.kernels.map((kernel) => kernel.bound)));
    bounds.delete("free");
    this.key.replaceChildren(...[...bounds].map((bound) => h("li", {}, swatch(bound), `mostly ${bound}`)));
    this.caption.textContent = "Each bar is a kernel, as wide as its modelled time, on one scale; the pale start of a bar is its launch.";
    this.mark();
  }

  drawBars(plan, top) {
    const bars = [];
    for (const kernel of plan.kernels) {
      if (!kernel.time) continue;
      const [x0, x1] = [this.x(kernel.start), this.x(kernel.start + kernel.time)];
      const last = bars.at(-1);
      if (last && x1 - last.x0 < NARROWEST_PX) {
        last.x1 = x1;
        last.count++;
        if (kernel.time > last.kernel.time) last.kernel = kernel;
      } else bars.push({ x0, x1, kernel, count: 1, plan });
    }
    const g = this.svg.append("g").selectAll("g").data(bars).join("g").attr("class", "bar").attr("tabindex", -1)
      .attr("role", "button").attr("aria-label", ({ kernel, count }) =>
        `${plan.planner}, kernel ${kernel.k}, ${kernel.name}, ${timeText(kernel.time)} µs${count > 1 ? `, and ${count - 1} short ones` : ""}`)
      .on("click", (_, { kernel }) => this.app.select({ plan, k: kernel.k, node: -1 }, this))
      .on("pointermove", (event, { kernel, count }) =>
        tip.show(event, [...kernelLines(plan, kernel), ...(count > 1 ? [`and ${count - 1} short kernels in this bar`] : [])]))
      .on("pointerleave", () => tip.hide());
    const gap = (bar) => (bar.x1 - bar.x0 > 3 ? 1 : 0);
    g.append("rect").attr("class", ({ kernel }) => kernel.bound).attr("x", ({ x0 }) => x0).attr("y", top)
      .attr("width", (bar) => Math.max(bar.x1 - bar.x0 - gap(bar), 0.4)).attr("height", 30);
    const launch = ({ kernel, count }) => {
      const part = kernel.parts.find(({ name }) => name === "launch");
      return count > 1 || !part || kernel.bound === "launch" ? 0 : this.x(part.ps) - this.x(0);
    };
    g.filter((bar) => launch(bar) > 1).append("rect").attr("class", "veil").attr("x", ({ x0 }) => x0).attr("y", top)
      .attr("width", launch).attr("height", 30);
    if (this.other) {
      const compared = plan.compare(plan === this.plan ? this.other : this.plan);
      g.filter(({ kernel, count }) => count === 1 && compared[kernel.k].same < 0)
        .append("rect").attr("class", "differs-mark").attr("x", ({ x0 }) => x0).attr("y", top + 31)
        .attr("width", (bar) => Math.max(bar.x1 - bar.x0 - gap(bar), 0.4)).attr("height", 3);
    }
    g.each((bar, i, all) => this.bars.set(`${plan.index} ${bar.kernel.k}`, d3.select(all[i])));
  }

  drawMemory(top, left) {
    const { plan, svg, x } = this;
    const { live } = plan;
    const peak = Math.max(0, ...live);
    this.memory = null;
    if (!peak) {
      svg.append("text").attr("class", "label").attr("x", left).attr("y", top + 13).text(`${plan.planner} has no temporaries.`);
      return top + 24;
    }
    const height = 110;
    const y = d3.scaleLinear([0, peak], [top + height, top + 32]);
    svg.append("text").attr("class", "label").attr("x", left).attr("y", top + 13)
      .text(`${plan.planner}: temporaries that are live, ${bytesText(peak)} at the peak`);
    const points = plan.kernels.map((kernel) => [x(kernel.start), y(live[kernel.k])]);
    points.push([x(plan.time), points.length ? y(live[plan.kernels.length - 1]) : y(0)]);
    const area = d3.area().curve(d3.curveStepAfter).x((p) => p[0]).y0(y(0)).y1((p) => p[1]);
    const line = d3.line().curve(d3.curveStepAfter);
    svg.append("path").attr("class", "live-area").attr("d", area(points));
    svg.append("path").attr("class", "live-line").attr("d", line(points));
    svg.append("g").attr("class", "axis").attr("transform", `translate(${left},0)`)
      .call(d3.axisLeft(y).tickValues([0, peak / 2, peak]).tickFormat(bytesText).tickSizeOuter(0));
    const bisect = d3.bisector((kernel) => kernel.start).right;
    const kernelAt = (event) => plan.kernels[Math.max(bisect(plan.kernels, x.invert(d3.pointer(event, svg.node())[0])) - 1, 0)];
    svg.append("rect").attr("class", "catcher").attr("x", left).attr("y", top + 24).attr("height", height - 24)
      .attr("width", Math.max(x(plan.time) - left, 0))
      .on("pointermove", (event) => {
        const kernel = kernelAt(event);
        tip.show(event, [`${bytesText(live[kernel.k])} live while kernel ${kernel.k} runs`, kernel.name]);
      })
      .on("pointerleave", () => tip.hide())
      .on("click", (event) => this.app.select({ plan, k: kernelAt(event).k, node: -1 }, this));
    this.memory = { top: top + 24, height: height - 24 };
    return top + height + 4;
  }

  mark() {
    const { selection } = this.app;
    this.svg.selectAll(".bar").classed("selected", false).attr("aria-current", null);
    this.svg.selectAll(".chosen-time").remove();
    if (!selection) return;
    const row = this.rows?.find(({ plan }) => plan === selection.plan);
    if (!row) return;
    for (const { k, start, time } of selection.k >= 0 ? [row.plan.kernels[selection.k]] : selection.box?.kernels ?? []) {
      this.bars.get(`${row.plan.index} ${k}`)?.classed("selected", true).attr("aria-current", "true");
      const [x0, x1] = [this.x(start), this.x(start + time)];
      const frames = [row, ...(row.plan === this.plan && this.memory ? [this.memory] : [])];
      for (const { top, height } of frames) {
        this.svg.append("rect").attr("class", "chosen-time").attr("x", x0 - 1).attr("y", top - 1)
          .attr("width", Math.max(x1 - x0 + 1, 2)).attr("height", height + 2);
      }
    }
  }
}

// --- Roofline -----------------------------------------------------------------------------------

class Roofline {
  constructor(host, app) {
    [this.host, this.app] = [host, app];
    this.svg = d3.create("svg").attr("class", "chart roofline").attr("role", "group");
    this.caption = h("p", { class: "caption" });
    host.append(this.svg.node(), this.caption);
    rove(this.svg.node(), ".dot");
  }

  show(plan, other) {
    [this.plan, this.other] = [plan, other];
    const { svg } = this;
    svg.selectChildren().remove();
    const { device } = plan.study;
    const points = (p) => p.kernels.filter((kernel) => kernel.flops && kernel.bytes && kernel.time)
      .sort((a, b) => b.time - a.time).slice(0, MOST_DOTS).sort((a, b) => a.k - b.k);
    const shown = points(plan);
    const behind = other ? points(other) : [];
    const all = [...shown, ...behind];
    const left_out = plan.kernels.length - shown.length;
    this.svg.attr("aria-label", `Roofline of ${device.name}: ${counted(shown.length, "kernel")} of the ${plan.planner} plan`);
    this.host.parentElement.hidden = !all.length;
    if (!all.length) return;
    const width = Math.min(this.host.clientWidth, 760);
    if (!width) return;
    const words = [
      `Each dot is a kernel, as large as its time: coloured, those of the ${plan.planner} plan${other ? `; hollow, those of the ${other.planner} plan` : ""}. The lines are the peaks of ${device.name}, for products of ${device.dtype}.`,
      left_out ? ` ${counted(left_out, "kernel")} without arithmetic, without traffic or beyond the ${countText(MOST_DOTS)} slowest ${left_out === 1 ? "is" : "are"} not shown.` : "",
    ];
    this.caption.textContent = words.join("");

    const intensity = (kernel) => kernel.flops / kernel.bytes;
    const rate = (kernel) => (kernel.flops * 1e12) / kernel.time;
    const narrow = width < 520;
    const [left, right, top, bottom] = [narrow ? 44 : 52, narrow ? 84 : 104, 24, 40];
    const height = Math.round(Math.min(Math.max(width * 0.62, 280), 420));
    const peak = Math.max(device.matrix, device.vector);
    const x = d3.scaleLog(
      [d3.min(all, intensity) / 2, Math.max(d3.max(all, intensity), peak / device.hbm) * 2], [left, width - right]);
    const y = d3.scaleLog([d3.min(all, rate) / 3, Math.max(peak, d3.max(all, rate)) * 1.6], [height - bottom, top]);
    const powers = (scale, most) => {
      const [low, high] = scale.domain().map(Math.log10);
      const step = Math.max(Math.ceil((high - low) / most), 1);
      return d3.range(Math.ceil(low), high, step).map((power) => 10 ** power);
    };
    const ticks = { x: powers(x, narrow ? 5 : 8), y: powers(y, 6) };
    const tickText = (value) => (value >= 1 ? siText(value).replace(" ", "\u202f").trim() : String(Number(value.toPrecision(1))));
    svg.append("g").attr("class", "grid").selectAll("path").data([
      ...ticks.x.map((t) => `M${x(t)},${top}V${height - bottom}`),
      ...ticks.y.map((t) => `M${left},${y(t)}H${width - right}`)]).join("path").attr("d", (d) => d);
    svg.append("g").attr("class", "axis").attr("transform", `translate(0,${height - bottom})`)
      .call(d3.axisBottom(x).tickValues(ticks.x).tickFormat(tickText).tickSizeOuter(0));
    svg.append("g").attr("class", "axis").attr("transform", `translate(${left},0)`)
      .call(d3.axisLeft(y).tickValues(ticks.y).tickFormat(tickText).tickSizeOuter(0));
    svg.append("text").attr("class", "label").attr("x", (left + width - right) / 2).attr("y", height - 6)
      .attr("text-anchor", "middle").text("operations per byte of memory traffic");
    svg.append("text").attr("class", "label").attr("x", 0).attr("y", 9).text("flop/s");

    // The roofs, labelled to the right of the plot, where no dot is.
    const clip = `clip-${boxes++}`;
    svg.append("clipPath").attr("id", clip).append("rect").attr("x", left).attr("y", top)
      .attr("width", width - left - right).attr("height", height - top - bottom);
    const lines = svg.append("g").attr("clip-path", `url(#${clip})`);
    const [low, high] = x.domain();
    const roofs = [{ name: narrow ? "matrix" : `matrix, ${device.dtype}`, rate: device.matrix, style: "roof" }];
    if (device.vector !== device.matrix) roofs.push({ name: "vector", rate: device.vector, style: "roof vector-roof" });
    for (const roof of roofs) {
      const ridge = roof.rate / device.hbm;
      const path = [[low, low * device.hbm], [Math.max(ridge, low), roof.rate], [high, roof.rate]];
      lines.append("path").attr("class", roof.style).attr("d", d3.line()(path.map(([a, b]) => [x(a), y(b)])));
    }
    const labels = roofs.map((roof) => ({ ...roof, at: y(roof.rate) })).sort((a, b) => a.at - b.at);
    if (labels.length > 1) labels[1].at = Math.max(labels[1].at, labels[0].at + 32);
    for (const { name, rate: r, at } of labels) {
      const label = svg.append("text").attr("class", "label roof-label").attr("x", width - right + 6).attr("y", at - 3);
      label.append("tspan").text(clipped(name, right - 8, 11.5));
      label.append("tspan").attr("x", width - right + 6).attr("dy", 14).text(`${siText(r)}flop/s`);
    }

    const slowest = d3.max(all, (kernel) => kernel.time);
    const radius = (kernel) => 3.2 + (narrow ? 7 : 10) * Math.sqrt(kernel.time / slowest);
    const draw = (p, kernels, style) => svg.append("g").selectAll("circle").data(kernels).join("circle")
      .attr("class", (kernel) => `dot ${style} ${kernel.bound}`).attr("tabindex", -1).attr("role", "button")
      .attr("aria-label", (kernel) => `${p.planner}, kernel ${kernel.k}, ${kernel.name}, ${siText(rate(kernel))}flop/s`)
      .attr("cx", (kernel) => x(intensity(kernel))).attr("cy", (kernel) => y(rate(kernel))).attr("r", radius)
      .on("click", (_, kernel) => this.app.select({ plan: p, k: kernel.k, node: -1 }, this))
      .on("pointermove", (event, kernel) => tip.show(event, [
        `${p.planner}: ${kernel.k} ${kernel.name}`,
        `${siText(rate(kernel))}flop/s at ${Number(intensity(kernel).toPrecision(3))} flop/byte`,
        `${timeText(kernel.time)} µs, mostly ${kernel.bound}`]))
      .on("pointerleave", () => tip.hide());
    const bySize = (kernels) => [...kernels].sort((a, b) => b.time - a.time);
    draw(other, bySize(behind), "hollow");
    this.dots = draw(plan, bySize(shown), "full");
    svg.select(".dot.full").attr("tabindex", 0);
    this.labelSlope(x, y, all.map((kernel) => [x(intensity(kernel)), y(rate(kernel)), radius(kernel)]), {
      left, top, right: width - right, bottom: height - bottom });
    svg.attr("width", width).attr("height", height).attr("viewBox", `0 0 ${width} ${height}`);
    this.mark();
  }

  // Writes the bandwidth along its line, at the first place where the text covers no dot.
  labelSlope(x, y, dots, { left, top, right, bottom }) {
    const { device } = this.plan.study;
    const text = `memory, ${siText(device.hbm)}B/s`;
    const [wide, tall] = [textWidth(text, 11.5) + 4, 14];
    const [low] = x.domain();
    const ridge = Math.max(device.matrix, device.vector) / device.hbm;
    for (let i = 1; i < 40; i++) {
      const at = low * (ridge / low) ** (1 - i / 40);
      const [px, py] = [x(at) - 8, y(at * device.hbm) - 4];
      const box = { x0: px - wide, x1: px, y0: py - tall, y1: py };
      if (box.x0 < left || box.y0 < top || box.x1 > right || box.y1 > bottom) continue;
      const free = dots.every(([cx, cy, r]) => {
        const [dx, dy] = [cx - Math.min(Math.max(cx, box.x0), box.x1), cy - Math.min(Math.max(cy, box.y0), box.y1)];
        return dx * dx + dy * dy > (r + 2) ** 2;
      });
      if (!free) continue;
      this.svg.append("text").attr("class", "label roof-label").attr("x", px).attr("y", py - 3).attr("text-anchor", "end").text(text);
      return;
    }
    this.caption.textContent += ` The slope is the memory's rate, ${siText(device.hbm)}B/s.`;
  }

  mark() {
    const { selection } = this.app;
    this.svg.selectAll(".dot").classed("selected", false).attr("aria-current", null);
    if (!selection) return;
    const chosen = new Set(selection.k >= 0 ? [selection.k] : selection.box?.kernels.map((kernel) => kernel.k));
    const style = selection.plan === this.plan ? ".full" : selection.plan === this.other ? ".hollow" : null;
    if (!style) return;
    this.svg.selectAll(`.dot${style}`).filter((kernel) => chosen.has(kernel.k))
      .classed("selected", true).attr("aria-current", "true");
  }
}
