// Lights up the group of a patch in every picture of groups within one component. Runs as its js_on_load.
let lit = null; // [row, column] as fractions of the picture, so that grids of any size agree

const figuresOf = () => [...element.querySelectorAll("figure.groups")];

function patchOf(figure) {
  const rows = Number(figure.dataset.rows), columns = Number(figure.dataset.columns);
  return [Math.min(rows - 1, Math.floor(lit[0] * rows)), Math.min(columns - 1, Math.floor(lit[1] * columns))];
}

function outline(members, rows, columns) {
  const edges = [];
  for (const patch of members) {
    const row = Math.floor(patch / columns), column = patch % columns;
    if (row === 0 || !members.has(patch - columns)) edges.push(`M${column} ${row}h1`);
    if (row === rows - 1 || !members.has(patch + columns)) edges.push(`M${column} ${row + 1}h1`);
    if (column === 0 || !members.has(patch - 1)) edges.push(`M${column} ${row}v1`);
    if (column === columns - 1 || !members.has(patch + 1)) edges.push(`M${column + 1} ${row}v1`);
  }
  return edges.join("");
}

function light() {
  const said = [];
  let leaves = null;
  for (const figure of figuresOf()) {
    const rows = Number(figure.dataset.rows), columns = Number(figure.dataset.columns);
    const labels = figure.dataset.labels.split(",").map(Number);
    const svg = figure.querySelector("svg");
    if (lit === null) { svg.innerHTML = ""; delete figure.dataset.size; continue; }
    const [row, column] = patchOf(figure);
    const label = labels[row * columns + column];
    const members = new Set(label < 0 ? [] : [...labels.keys()].filter(patch => labels[patch] === label));
    const holes = [...members].map(patch => `M${patch % columns} ${Math.floor(patch / columns)}h1v1h-1z`).join("");
    svg.innerHTML = `<path class="dim" fill-rule="evenodd" d="M0 0H${columns}V${rows}H0z${holes}"/>` +
      `<path class="rim" d="${outline(members, rows, columns)}"/>` +
      `<rect class="here" x="${column}" y="${row}" width="1" height="1"/>`;
    figure.dataset.size = members.size;
    figure.dataset.members = [...members].join(" ");
    if (leaves === null) leaves = members;
    const where = [...members].map(patch => `${Math.floor(patch / columns) + 1}/${patch % columns + 1}`);
    const many = members.size > 24 ? `${where.slice(0, 24).join(", ")}, …` : where.join(", ");
    said.push(label < 0 ? `${figure.dataset.name.trim()}: the patch at ${row + 1}/${column + 1} was dropped` :
      `${figure.dataset.name.trim()}: ${members.size} ${members.size === 1 ? "patch" : "patches"} (row/column ${many})`);
  }
  for (const leaf of element.querySelectorAll("[data-leaf]"))
    leaf.classList.toggle("lit", leaves !== null && leaves.has(Number(leaf.dataset.leaf)));
  const status = element.querySelector(".lit[role=status]");
  if (status && said.length) status.innerHTML = said.map(text => `<span>${text}</span>`).join("");
}

element.addEventListener("click", event => {
  const figure = event.target.closest("figure.groups");
  if (!figure) return;
  const box = figure.querySelector(".frame").getBoundingClientRect();
  const down = (event.clientY - box.top) / box.height, across = (event.clientX - box.left) / box.width;
  if (down < 0 || down >= 1 || across < 0 || across >= 1) return;
  lit = [down, across];
  light();
});

element.addEventListener("keydown", event => {
  const figure = event.target.closest("figure.groups");
  if (!figure) return;
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Enter: [0, 0], " ": [0, 0] };
  if (event.key === "Escape") { lit = null; light(); return; }
  const step = steps[event.key];
  if (!step) return;
  event.preventDefault();
  const rows = Number(figure.dataset.rows), columns = Number(figure.dataset.columns);
  const [row, column] = lit === null ? [Math.floor(rows / 2), Math.floor(columns / 2)] : patchOf(figure);
  const next = lit === null ? [row, column] : [row + step[0], column + step[1]];
  lit = [(Math.min(rows - 1, Math.max(0, next[0])) + 0.5) / rows,
         (Math.min(columns - 1, Math.max(0, next[1])) + 0.5) / columns];
  light();
});

watch("value", () => { if (lit !== null) light(); });
