"use strict";
// Two kinds of tables. Small ones are part of the page and only sorted. The table of neurons is unpacked from base64 and may
// have half a million rows: row numbers are sorted and filtered, and only the rows in view are created.

const ROW_HEIGHT = 24;
const OVERSCAN = 12;
const SHARED = -1;

/** Make a heading a button that calls back with the new direction; the first click sorts descending. */
function sortable(heading, sort) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...heading.childNodes);
  heading.append(button);
  button.addEventListener("click", () => {
    const direction = heading.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
    for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", direction);
    sort(direction === "ascending" ? 1 : -1);
  });
}

/** Sort the rows of a table by a column: by data-value if present, else by text; rows without a value come last. */
function sortRows(table, column, sign) {
  const body = table.tBodies[0];
  const key = row => {
    const cell = row.cells[column];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
  };
  const keyed = [...body.rows].map(row => [key(row), row]);
  keyed.sort(([a], [b]) => {
    if (typeof a === "string") return sign * a.localeCompare(b);
    return Number.isNaN(a) - Number.isNaN(b) || sign * (a - b) || 0;
  });
  body.append(...keyed.map(([, row]) => row));
}

/** The columns of a packed table, by name: see reports/html/packed_table.py. */
async function unpack(header, text) {
  const packed = atob(text.trim());
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const columns = {};
  header.columns.forEach((name, place) => {
    const start = 4 * header.rows * place;
    const values = new Uint8Array(4 * header.rows);
    for (let byte = 0; byte < 4; byte++) {
      const plane = start + byte * header.rows;
      for (let row = 0; row < header.rows; row++) values[4 * row + byte] = planes[plane + row];
    }
    columns[name] = new Float32Array(values.buffer);
  });
  return columns;
}

/** Turn a search into a test of row numbers; throws the word that it cannot parse. */
function parseSearch(text, columns) {
  const compare = {
    ">": (a, b) => a > b, "<": (a, b) => a < b, ">=": (a, b) => a >= b, "<=": (a, b) => a <= b, "=": (a, b) => a === b,
  };
  const spaced = text.replace(/\s*(>=|<=|>|<|=)\s*/g, "$1").trim();
  const tests = (spaced ? spaced.split(/\s+/) : []).map(word => {
    const place = word.match(/^(?:(\d+):)?(?:(\d+|shared):)?(\d+)$/);
    if (place && (place[2] === undefined || columns.expert)) {
      const [layer, expert, neuron] = place.slice(1).map(part => (part === "shared" ? SHARED : part && Number(part)));
      return row => columns.neuron[row] === neuron && (layer === undefined || columns.layer[row] === layer)
        && (expert === undefined || columns.expert[row] === expert);
    }
    const [, name, sign, bound] = word.match(/^(\w+)(>=|<=|>|<|=)([-+.\deE]+)$/) ?? [];
    if (!Object.hasOwn(columns, name ?? "") || Number.isNaN(Number(bound))) throw word;
    const values = columns[name], limit = Math.fround(Number(bound));
    return row => compare[sign](values[row], limit);
  });
  return row => tests.every(test => test(row));
}

function shown(value, name) {
  if (name === "expert" && value === SHARED) return "shared";
  if (Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  const digits = value === 0 || Number.isInteger(value) ? String(value) : size < 1e-3 || size >= 1e5 ? value.toExponential(3) : value.toPrecision(4);
  return digits.replace(/-/g, "−");
}

class NeuronTable {
  constructor(columns, names, rows) {
    Object.assign(this, { columns, names, rows, sorted: Uint32Array.from({ length: rows }, (_, row) => row) });
    this.box = document.getElementById("neuron-rows");
    this.table = this.box.querySelector("table");
    this.body = this.table.tBodies[0];
    this.layer = document.getElementById("layer-filter");
    this.search = document.getElementById("search");
    this.found = document.getElementById("found");
    const headings = [...this.table.tHead.rows[0].cells];
    headings.forEach((heading, place) => sortable(heading, sign => this.sort(names[place], sign)));
    this.layer.addEventListener("input", () => this.filter());
    this.search.addEventListener("input", () => this.filter());
    this.search.form.addEventListener("submit", event => event.preventDefault());
    this.box.addEventListener("scroll", () => this.draw(), { passive: true });
    this.above = this.gap();
    this.below = this.gap();
    headings.find(heading => heading.dataset.name === "score").setAttribute("aria-sort", "descending");
    this.sort("score", -1);
  }

  gap() {
    const row = document.createElement("tr");
    row.className = "gap";
    row.setAttribute("aria-hidden", "true");
    row.insertCell().colSpan = this.names.length;
    return row;
  }

  /** Equal values keep the order of layer and neuron; rows without a value come last. */
  sort(name, sign) {
    const values = this.columns[name];
    const known = [], unknown = [];
    for (let row = 0; row < this.rows; row++) (Number.isNaN(values[row]) ? unknown : known).push(row);
    const order = Uint32Array.from(known).sort((a, b) => sign * (values[a] - values[b]) || a - b);
    this.sorted.set(order);
    this.sorted.set(unknown, known.length);
    this.filter();
  }

  filter() {
    let fits;
    try {
      fits = parseSearch(this.search.value, this.columns);
      this.search.removeAttribute("aria-invalid");
    } catch (word) {
      this.search.setAttribute("aria-invalid", "true");
      this.found.textContent = `“${word}” is not understood: write 1229, 11:1229, or a column and a bound like score>2`;
      return;
    }
    const layer = this.layer.value === "" ? null : Number(this.layer.value);
    this.order = this.sorted.filter(row => (layer === null || this.columns.layer[row] === layer) && fits(row));
    this.found.textContent = `${this.order.length.toLocaleString("en")} of ${this.rows.toLocaleString("en")} neurons`;
    this.table.setAttribute("aria-rowcount", this.order.length + 1);
    this.box.scrollTop = 0;
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW_HEIGHT) - OVERSCAN);
    const last = Math.min(this.order.length, first + Math.ceil(this.box.clientHeight / ROW_HEIGHT) + 2 * OVERSCAN);
    const drawn = document.createDocumentFragment();
    this.above.firstChild.style.height = `${first * ROW_HEIGHT}px`;
    this.below.firstChild.style.height = `${(this.order.length - last) * ROW_HEIGHT}px`;
    for (let place = first; place < last; place++) {
      const row = document.createElement("tr");
      row.setAttribute("aria-rowindex", place + 2);
      for (const name of this.names) row.insertCell().textContent = shown(this.columns[name][this.order[place]], name);
      drawn.append(row);
    }
    this.body.replaceChildren(this.above, drawn, this.below);
  }
}

document.documentElement.classList.add("scripted");
for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((heading, column) => sortable(heading, sign => sortRows(table, column, sign)));
}
const header = document.getElementById("neuron-header");
if (header) {
  const { columns: names, rows } = JSON.parse(header.textContent);
  unpack({ columns: names, rows }, document.getElementById("neuron-data").textContent).then(
    columns => { new NeuronTable(columns, names, rows); },
    error => { document.getElementById("found").textContent = `this browser cannot read the table: ${error}`; },
  );
}
