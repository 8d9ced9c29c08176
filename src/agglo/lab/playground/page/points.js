// A click on a point of the curve, or Enter on it, tells its number.
const send = event => {
  const point = event.target.closest("[data-point]");
  if (!point) return;
  event.preventDefault();
  trigger("click", { point: Number(point.dataset.point) });
};
element.addEventListener("click", send);
element.addEventListener("keydown", event => { if (event.key === "Enter" || event.key === " ") send(event); });
