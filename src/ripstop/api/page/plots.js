// Plots over time, drawn by uPlot: step time, goodput, memory, GPU.  Thin lines mark where rounds began.

import { color, el, find, replace, setText } from "./dom.js";
import { bytes, clock, dateTime, duration, percent } from "./format.js";

const HEIGHT = 170;
const PLOTS = [
  {
    title: "Step time",
    format: duration,
    series: [
      ["step_time_p50", "p50", "series-1"],
      ["step_time_p99", "p99", "series-2"],
    ],
  },
  { title: "Goodput", format: percent, range: [0, 1.04], series: [["goodput", "since the start", "series-3"]] },
  {
    title: "Memory of the largest worker",
    format: bytes,
    incrs: Array.from({ length: 44 }, (_, power) => 2 ** power),
    series: [["memory", "resident", "series-1"]],
  },
  {
    title: "GPU",
    format: percent,
    range: [0, 1.04],
    series: [
      ["gpu", "busy, mean", "series-3"],
      ["gpu_memory", "memory, highest", "series-2"],
    ],
  },
];

export class Plots {
  constructor(model) {
    this.model = model;
    this.figures = PLOTS.map((plot) => {
      const values = el("span", { class: "values" });
      const place = el("div", { class: "plot" });
      return {
        plot,
        values,
        place,
        chart: null,
        figure: el("figure", {}, el("figcaption", {}, el("b", {}, plot.title), values), place),
      };
    });
    replace(
      find("plots"),
      this.figures.map(({ figure }) => figure),
    );
    new ResizeObserver(() => this.resize()).observe(find("plots"));
  }

  update() {
    const { history } = this.model;
    const points = history?.at.length ?? 0;
    setText(
      find("plots-note"),
      points ? `since ${dateTime(history.at[0])}` : "The first sample is taken within ten seconds.",
    );
    for (const figure of this.figures) {
      const names = figure.plot.series.map(([name]) => name);
      const isEmpty = !points || names.every((name) => history[name].every((value) => value === null));
      figure.figure.classList.toggle("empty", isEmpty);
      if (isEmpty) {
        figure.chart?.destroy();
        figure.chart = null;
        setText(figure.values, "not reported");
        continue;
      }
      const data = [history.at, ...names.map((name) => history[name])];
      if (figure.chart) figure.chart.setData(data);
      else figure.chart = this.make(figure, data);
      this.showValues(figure, points - 1);
    }
  }

  /** After a change of the colour scheme. */
  redraw() {
    for (const figure of this.figures) {
      figure.chart?.destroy();
      figure.chart = null;
    }
    this.update();
  }

  resize() {
    for (const { chart, place } of this.figures) chart?.setSize({ width: place.clientWidth, height: HEIGHT });
  }

  make(figure, data) {
    const { plot, place } = figure;
    const line = { stroke: color("line"), width: 1 };
    const axis = { stroke: color("muted"), grid: line, ticks: line, font: "11px system-ui, sans-serif" };
    const options = {
      width: place.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      padding: [10, 10, 0, 0],
      cursor: { sync: { key: "ripstop" }, y: false, drag: { x: true, y: false } },
      scales: { y: { range: plot.range ?? ((_, low, high) => [0, (high || 1) * 1.15]) } },
      axes: [
        {
          ...axis,
          size: 26,
          values: (_, ticks) => ticks.map((at) => clock(at).slice(0, ticks.at(-1) - ticks[0] < 300 ? 8 : 5)),
          space: 80,
        },
        {
          ...axis,
          size: 62,
          ...(plot.incrs && { incrs: plot.incrs }),
          values: (_, ticks) => ticks.map((value) => plot.format(value).replace(".0 ", " ")),
          space: 36,
        },
      ],
      series: [
        {},
        ...plot.series.map(([, label, name]) => ({
          label,
          stroke: color(name),
          width: 2,
          points: { show: data[0].length < 2 },
          spanGaps: false,
        })),
      ],
      hooks: {
        drawClear: [(chart) => this.drawRounds(chart)],
        setCursor: [(chart) => this.showValues(figure, chart.cursor.idx ?? this.model.history.at.length - 1)],
      },
    };
    return new uPlot(options, data, place);
  }

  drawRounds(chart) {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.fillStyle = color("bad");
    ctx.globalAlpha = 0.35;
    for (const round of this.model.rounds.values()) {
      if (round.number <= 1) continue;
      const x = chart.valToPos(round.formed, "x", true);
      if (x > bbox.left && x < bbox.left + bbox.width)
        ctx.fillRect(Math.round(x), bbox.top, Math.max(1, window.devicePixelRatio), bbox.height);
    }
    ctx.restore();
  }

  showValues({ plot, values }, index) {
    const { history } = this.model;
    const texts = plot.series.map(([name, label, tone]) =>
      el("span", {}, el("i", { class: `swatch ${tone}` }), `${label} `, el("b", {}, plot.format(history[name][index]))),
    );
    replace(values, texts);
  }
}
