// Lights up the group of a patch in every figure of groups within one component. Runs as its js_on_load.
let lit = null; // [row, column] as fractions of the image, so that grids of any size agree

// rows, columns: of all patches. down, across: how many lie over the image, if a padded grid reaches beyond it.
const gridOf = figure => Object.fromEntries(
  ["rows", "columns", "down", "across"].map(name => [name, Number(figure.dataset[name])]));

const within = (place, span) => Math.min(Math.ceil(span) - 1, Math.max(0, place));

function patchOf(figure) {
  const { down, across } = gridOf(figure);
  return [within(Math.floor(lit[0] * down), down), within(Math.floor(lit[1] * across), across)];
}

// Nodes, never markup: names in a figure are text, whatever they hold.
function shape(kind, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
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
  for (const figure of element.querySelectorAll("figure.groups")) {
    const { rows, columns } = gridOf(figure);
    const labels = figure.dataset.labels.split(",").map(Number);
    const svg = figure.querySelector("svg");
    if (lit === null) { svg.replaceChildren(); delete figure.dataset.size; continue; }
    const [row, column] = patchOf(figure);
    const label = labels[row * columns + column];
    const members = new Set(label < 0 ? [] : [...labels.keys()].filter(patch => labels[patch] === label));
    const holes = [...members].map(patch => `M${patch % columns} ${Math.floor(patch / columns)}h1v1h-1z`).join("");
    svg.replaceChildren(
      shape("path", { class: "dim", "fill-rule": "evenodd", d: `M0 0H${columns}V${rows}H0z${holes}` }),
      shape("path", { class: "rim", d: outline(members, rows, columns) }),
      shape("rect", { class: "here", x: column, y: row, width: 1, height: 1 }));
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
  if (status && said.length) status.innerText = said.join("\n"); // which is text, with a line break between two
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
  const { down, across } = gridOf(figure);
  const [row, column] = lit === null ? [Math.floor(down / 2), Math.floor(across / 2)] : patchOf(figure);
  const next = lit === null ? [row, column] : [row + step[0], column + step[1]];
  lit = [(within(next[0], down) + 0.5) / down, (within(next[1], across) + 0.5) / across];
  light();
});

watch("value", () => { if (lit !== null) light(); });
