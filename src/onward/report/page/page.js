// Values under the pointer: for every chart, each series' value at the nearest update.
for (const chart of document.querySelectorAll("figure.chart")) {
  const data = JSON.parse(chart.querySelector("script").textContent);
  const svg = chart.querySelector("svg"), pointer = svg.querySelector(".pointer"), box = chart.querySelector(".values");
  const nearest = (points, update) =>
    points.reduce((best, point) => (Math.abs(point[0] - update) < Math.abs(best[0] - update) ? point : best));
  svg.addEventListener("pointermove", (event) => {
    const area = svg.getBoundingClientRect();
    const x = ((event.clientX - area.left) / area.width) * data.width;
    const share = Math.min(1, Math.max(0, (x - data.left) / (data.right - data.left)));
    const update = data.low + share * (data.high - data.low);
    const lines = data.series.map((series) => {
      const [at, value] = nearest(series.points, update);
      const line = document.createElement("div");
      line.style.color = series.color;
      line.textContent = `${series.name || "value"}: ${value === null ? "not finite" : value} (update ${at})`;
      return line;
    });
    box.replaceChildren(...lines);
    box.hidden = false;
    const here = data.left + share * (data.right - data.left);
    pointer.setAttribute("x1", here);
    pointer.setAttribute("x2", here);
    pointer.setAttribute("visibility", "visible");
  });
  svg.addEventListener("pointerleave", () => {
    box.hidden = true;
    pointer.setAttribute("visibility", "hidden");
  });
}
