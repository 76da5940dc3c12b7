// Draws the charts of a page with uPlot. The table below the charts has the same figures, for readers without this script.
"use strict";
(() => {
  const HEIGHT = 190;
  const charts = new Map();
  const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const draw = (element) => {
    const { times, lines } = JSON.parse(element.dataset.chart);
    const rule = { stroke: colour("--line"), width: 1 };
    const axis = { stroke: colour("--dim"), grid: rule, ticks: rule };
    const options = {
      width: element.clientWidth || 320,
      height: HEIGHT,
      cursor: { drag: { x: false, y: false } },
      scales: { y: { range: (chart, least, most) => [0, most > 0 ? most * 1.05 : 1] } },
      axes: [{ ...axis, values: (chart, splits) => splits.map(clock) }, { ...axis, size: 56 }],
      series: [{ label: "Time", value: (chart, at) => at === null ? "–" : clock(at) }, ...lines.map((line) => ({ label: line.label, stroke: colour(line.colour), width: 2, dash: line.dash, spanGaps: false }))],
    };
    element.replaceChildren();
    const seconds = times.map((time) => Date.parse(time) / 1000);
    charts.set(element, new window.uPlot(options, [seconds, ...lines.map((line) => line.values)], element));
  };

  const drawAll = () => {
    for (const [element, chart] of charts) if (!element.isConnected) { chart.destroy(); charts.delete(element); }
    for (const element of document.querySelectorAll("[data-chart]")) draw(element);
  };

  if (!window.uPlot) return;
  drawAll();
  document.body.addEventListener("htmx:afterSwap", drawAll);
  new MutationObserver(drawAll).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  window.addEventListener("resize", () => {
    for (const [element, chart] of charts) chart.setSize({ width: element.clientWidth || 320, height: HEIGHT });
  });
})();
