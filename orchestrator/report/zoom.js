// All plots of a page share one zoom and scroll position; without this script they show the full time range.
const ZOOM_MAX = 64;
let zoom = 1;
const plots = () => document.querySelectorAll(".scroll");
function show(factor, at = 0.5) {
  const before = zoom, first = plots()[0];
  if (!first) return;
  const place = (first.scrollLeft + at * first.clientWidth) / before;
  zoom = Math.min(ZOOM_MAX, Math.max(1, factor));
  document.documentElement.style.setProperty("--zoom", zoom);
  move(place * zoom - at * first.clientWidth);
}
function move(left) {
  for (const plot of plots()) if (Math.abs(plot.scrollLeft - left) > 1) plot.scrollLeft = left;
}
function press(key) {
  const factor = { "+": zoom * 2, "=": zoom * 2, "-": zoom / 2, "0": 1 }[key];
  if (factor) show(factor);
  return Boolean(factor);
}
document.addEventListener("keydown", (event) => {
  if (event.target.matches(".scroll") && !event.ctrlKey && !event.metaKey && press(event.key)) event.preventDefault();
});
document.addEventListener("wheel", (event) => {
  const plot = event.target.closest(".scroll");
  if (!plot || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  show(zoom * (event.deltaY < 0 ? 1.25 : 0.8), (event.clientX - plot.getBoundingClientRect().left) / plot.clientWidth);
}, { passive: false });
document.addEventListener("scroll", (event) => {
  if (event.target.matches?.(".scroll")) move(event.target.scrollLeft);
}, true);
document.addEventListener("click", (event) => {
  if (event.target.matches(".tools[data-zoom] button")) press(event.target.value);
});
function tools() {
  for (const one of document.querySelectorAll(".tools[data-zoom]")) one.hidden = false;
}
tools();
