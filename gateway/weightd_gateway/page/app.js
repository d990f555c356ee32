// Polls status.json each second and draws it. Names and texts are untrusted: they become text nodes, never markup.
"use strict";

const POLL_INTERVAL_MS = 1000;
// Milliseconds until a poll fails.
const TIMEOUT_MS = 5000;
// Maximum age of the overview, in milliseconds, without a notice on the page that it is out of date.
const FRESH_MS = 3500;
// Maximum number of segments in a bar. With more, the bar would show only the lines between segments.
const MAX_SEGMENTS = 48;
// Maximum number of processes shown for a model, so that long tables do not slow down the browser.
const MAX_PROCESSES = 64;
const RATE_POINTS = 60;
// Minimum width, in pixels, of a bar's segment with a label.
const MIN_LABELLED_PX = 64;

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

// --- numbers as text ---

const NONE = "–";
const number = (value, digits) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const rate = (value) => (value === null ? NONE : number(value, value < 100 ? 1 : 0));
const whole = (value) => number(value, 0);

function size(bytes) {
  if (bytes === null) return NONE;
  if (bytes >= 1e9) return `${number(bytes / 1e9, 2)} GB`;
  return `${number(bytes / 1e6, bytes < 1e8 ? 1 : 0)} MB`;
}

function time(seconds) {
  if (seconds === null) return NONE;
  const [value, unit] = seconds >= 1 ? [seconds, "s"] : [seconds * 1e3, "ms"];
  return `${number(value, value < 10 ? 2 : value < 100 ? 1 : 0)} ${unit}`;
}

function duration(seconds) {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  let left = Math.floor(seconds);
  const parts = [];
  for (const [unit, length] of units) {
    const count = Math.floor(left / length);
    left -= count * length;
    if (count || parts.length || unit === "s") parts.push(`${count} ${unit}`);
  }
  return parts.slice(0, 2).join(" ");
}

const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;

// --- elements; updates change only what differs, so that selection and focus are kept ---

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function mark(element, className) {
  if (element.className !== className) element.className = className;
}

function keyed(parent, items, key, create, update) {
  const existing = parent.children_ || (parent.children_ = new Map());
  const keys = new Set(items.map(key));
  for (const [name, element] of existing) {
    if (!keys.has(name)) {
      element.remove();
      existing.delete(name);
    }
  }
  let last = null;
  for (const item of items) {
    const name = key(item);
    if (!existing.has(name)) existing.set(name, create(item));
    const element = existing.get(name);
    const after = last === null ? parent.firstChild : last.nextSibling;
    if (element !== after) parent.insertBefore(element, after);
    update(element, item);
    last = element;
  }
}

function spark() {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", `0 0 ${RATE_POINTS - 1} 24`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  for (const part of ["area", "curve"]) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", part);
    svg.append(path);
  }
  return svg;
}

function drawSpark(svg, values) {
  const most = Math.max(...values.map((value) => value || 0)) || 1;
  const begin = RATE_POINTS - values.length;
  let curve = "";
  let area = "";
  let from = null;
  values.forEach((value, index) => {
    if (value === null) {
      from = null;
      return;
    }
    const x = begin + index;
    const point = `${x} ${(23 - (22 * value) / most).toFixed(2)}`;
    curve += from === null ? `M${point}` : `L${point}`;
    area += from === null ? `M${x} 24L${point}` : `L${point}`;
    from = x;
    const next = values[index + 1];
    if (next === undefined || next === null) area += `L${x} 24Z`;
  });
  svg.firstChild.setAttribute("d", area);
  svg.lastChild.setAttribute("d", curve);
}

// --- memory ---

// A segment of a bar: its kind, size and label, and whether it is `joined` to the next one.
const segment = (kind, bytes, label = "", joined = false) => ({ kind, bytes, label, joined });

function withWeightd(models) {
  const copies = models.map(({ name, memory }) => segment("copy", memory.copy_bytes, name));
  const beside = models.flatMap(({ memory }) => split("beside", memory.workers, memory.private_bytes));
  return [...copies, ...beside];
}

// The memory of a model without sharing: one copy of the weights, and a repeated copy for each further worker.
function asPlain(models) {
  return models.flatMap(({ name, memory }) => {
    const { workers, processes, without_sharing_bytes: plain } = memory;
    if (!workers) return [segment("other", plain)];
    const weights = Math.min(memory.copy_bytes, plain / processes);
    // Only workers that share weights would repeat them.
    const beside = (plain - weights * workers) / workers;
    if (workers > MAX_SEGMENTS) {
      const again = segment("again", weights * (workers - 1));
      return [segment("copy", weights, name), again, segment("beside", beside * workers)];
    }
    return Array.from({ length: workers }, (_, index) => [
      index ? segment("again", weights, "", true) : segment("copy", weights, name, true),
      segment("beside", beside),
    ]).flat();
  });
}

function split(kind, count, bytes) {
  if (!count) return [];
  if (count > MAX_SEGMENTS) return [segment(kind, bytes)];
  return Array.from({ length: count }, () => segment(kind, bytes / count));
}

function drawBar(bar, segments, scale) {
  const visible = segments.filter((each) => each.bytes > 0);
  while (bar.children.length > visible.length) bar.lastChild.remove();
  while (bar.children.length < visible.length) bar.append(make("i"));
  const width = bar.clientWidth;
  visible.forEach(({ kind, bytes, label, joined }, index) => {
    const element = bar.children[index];
    const share = bytes / scale;
    mark(element, joined ? `${kind} joined` : kind);
    element.style.width = `${(100 * share).toFixed(3)}%`;
    write(element, share * width < MIN_LABELLED_PX ? "" : label);
  });
}

function measure(kind) {
  const element = make("div", `measure ${kind}`);
  const line = make("p");
  line.append(make("span"), make("strong"));
  const bar = make("div", "bar");
  bar.setAttribute("role", "img");
  element.append(line, bar);
  return element;
}

function drawMeasure(element, [, label, bytes, segments, scale]) {
  const [line, bar] = element.children;
  write(line.firstChild, label);
  write(line.lastChild, size(bytes));
  bar.setAttribute("aria-label", `${label}: ${size(bytes)}`);
  drawBar(bar, segments, scale);
}

function drawMemory(overview) {
  const memory = overview.memory;
  byId("memory").hidden = memory === null;
  if (memory === null) return;
  const models = overview.models.filter((model) => model.memory !== null);
  const scale = Math.max(memory.total_bytes, memory.without_sharing_bytes);
  const shares = memory.workers > 0;
  const label = shares
    ? `With weightd: one copy of the weights of each model, ${plural(memory.workers, "worker")}`
    : "With weightd: nothing shared yet";
  const measures = [["with", label, memory.total_bytes, [...withWeightd(models), segment("other", otherBytes(memory, models))], scale]];
  if (shares) {
    const plain = `As ${plural(memory.processes, "plain process")}: one copy of the weights each`;
    measures.push(["plain", plain, memory.without_sharing_bytes, asPlain(models), scale]);
  }
  keyed(byId("bars"), measures, (each) => each[0], (each) => measure(each[0]), drawMeasure);
}

function otherBytes(memory, models) {
  const drawn = models.reduce((sum, each) => sum + each.memory.copy_bytes + each.memory.private_bytes, 0);
  return Math.max(0, memory.total_bytes - drawn);
}

// --- requests and latency ---

function tile() {
  const element = make("div", "tile");
  const list = make("dl");
  const value = make("dd");
  value.append(make("span"), make("small"));
  list.append(make("dt"), value);
  element.append(list);
  return element;
}

function drawTile(element, [, label, value, unit, values]) {
  const [name, figure] = element.firstChild.children;
  write(name, label);
  write(figure.firstChild, value);
  write(figure.lastChild, unit);
  if (values === null) return;
  if (element.children.length < 2) element.append(spark());
  drawSpark(element.lastChild, values);
}

function drawThroughput(overview) {
  const throughput = overview.throughput;
  const refused = overview.tenants.reduce((sum, tenant) => sum + (tenant.refused_rate || 0), 0);
  const tiles = [
    ["rate", "Requests", rate(throughput.rate), ` per second${refused ? `, ${rate(refused)} refused` : ""}`, throughput.rates],
    ["latency", "99th percentile latency", time(throughput.p99_s), ` median ${time(throughput.p50_s)}`, throughput.p99s_s],
    ["queue", "Queued", whole(overview.queued), ` ${whole(overview.running)} running`, null],
  ];
  keyed(byId("throughput"), tiles, (each) => each[0], tile, drawTile);
}

// --- tables ---

// A column: [heading, fill(cell, row), class].
function table(columns) {
  const element = make("table");
  const head = make("tr");
  for (const [heading, , className] of columns) {
    const cell = make("th", className, heading);
    cell.scope = "col";
    head.append(cell);
  }
  const top = make("thead");
  top.append(head);
  element.append(top, make("tbody"));
  return element;
}

function row(columns) {
  const element = make("tr");
  for (const [heading, , className] of columns) {
    const cell = make("td", className);
    cell.dataset.label = heading;
    element.append(cell);
  }
  return element;
}

const fill = (columns, element, item) => columns.forEach(([, draw], index) => draw(element.children[index], item));
const text = (of) => (cell, item) => write(cell, of(item));

function drawName(cell, model) {
  if (!cell.firstChild) {
    const button = make("button", "open");
    button.type = "button";
    button.setAttribute("aria-expanded", "false");
    button.addEventListener("click", () => toggle(button));
    cell.append(button, make("small"));
  }
  const [button, below] = cell.children;
  button.model_ = model.name;
  write(button, model.name);
  write(below, [model.engine, model.device, model.generation ? `generation ${model.generation}` : ""]
    .filter((each) => each).join(" · "));
}

function drawState(cell, model) {
  if (!cell.firstChild) cell.append(make("span"));
  mark(cell.firstChild, `state ${model.state === "failed" ? "bad" : model.ready ? "good" : "warn"}`);
  write(cell.firstChild, model.state !== "serving" && model.progress ? model.progress : model.state);
}

function drawRate(cell, model) {
  if (!cell.firstChild) cell.append(spark(), make("span", "figure"), make("small", "warn"));
  const [curve, figure, below] = cell.children;
  drawSpark(curve, model.throughput.rates);
  write(figure, rate(model.throughput.rate));
  write(below, model.refused_rate ? `${rate(model.refused_rate)} refused` : "");
}

function drawWorkers(cell, model) {
  if (!cell.firstChild) cell.append(make("span"), make("small"));
  const [figure, below] = cell.children;
  mark(figure, model.ready_workers < model.desired_workers ? "warn" : "well");
  write(figure, model.desired_workers ? `${whole(model.ready_workers)} of ${whole(model.desired_workers)}` : NONE);
  write(below, model.unexpected_exits ? `${whole(model.unexpected_exits)} crashed` : "");
}

function drawModelMemory(cell, model) {
  if (!cell.firstChild) {
    const pair = make("span", "pair");
    pair.append(make("div", "bar"), make("div", "bar"));
    pair.setAttribute("aria-hidden", "true");
    const sizes = make("span", "sizes");
    sizes.append(make("span"), make("small"));
    cell.append(pair, sizes);
  }
  const [pair, sizes] = cell.children;
  const memory = model.memory;
  pair.hidden = memory === null;
  write(sizes.firstChild, memory === null ? (model.group ? `in ${model.group}` : NONE) : size(memory.total_bytes));
  write(sizes.lastChild, memory !== null && memory.workers ? `plain ${size(memory.without_sharing_bytes)}` : "");
  if (memory === null) return;
  const { copy_bytes: copy, private_bytes: beside, other_bytes: other } = memory;
  drawBar(pair.firstChild, [segment("copy", copy), segment("beside", beside), segment("other", other)], model.scale);
  drawBar(pair.lastChild, memory.workers ? [segment("again", memory.without_sharing_bytes)] : [], model.scale);
}

const MODELS = [
  ["Model", drawName, "name left"],
  ["State", drawState, "left"],
  ["Workers", drawWorkers, ""],
  ["Requests/s", drawRate, "rate"],
  ["Queued", text((model) => whole(model.queued)), ""],
  ["Median", text((model) => time(model.throughput.p50_s)), ""],
  ["99th percentile", text((model) => time(model.throughput.p99_s)), ""],
  ["Memory", drawModelMemory, "memory"],
];

const PROCESSES = [
  ["Process", text((process) => process.name.startsWith(`${process.model}.`) ? process.name.slice(process.model.length + 1) : process.name), "left"],
  ["Role", text((process) => process.role), "left"],
  ["State", text((process) => process.state), "left"],
  ["Device", text((process) => process.device), "left"],
  ["Requests/s", text((process) => rate(process.rate)), ""],
  ["Running", text((process) => whole(process.in_flight)), ""],
  ["99th percentile", text((process) => time(process.p99_s)), ""],
  ["Memory", text((process) => size(process.pss_bytes)), ""],
  ["Private", text((process) => size(process.private_bytes)), ""],
];

const TENANTS = [
  ["Tenant", text((tenant) => tenant.name), "name left"],
  ["Weight", text((tenant) => String(tenant.weight)), ""],
  ["Share", text((tenant) => (tenant.share === null ? NONE : `${number(100 * tenant.share, 0)} %`)), ""],
  ["Requests/s", text((tenant) => rate(tenant.rate)), ""],
  ["Refused/s", text((tenant) => rate(tenant.refused_rate)), ""],
  ["In flight", text((tenant) => whole(tenant.in_flight)), ""],
  ["Queued", text((tenant) => whole(tenant.queued)), ""],
  ["Mean queue time", text((tenant) => time(tenant.wait_s)), ""],
  ["Served", text((tenant) => whole(tenant.served)), ""],
  ["Refused", text((tenant) => whole(tenant.refused)), ""],
];

// Names of the models whose processes are shown.
const opened = new Set();

function toggle(button) {
  const name = button.model_;
  if (!opened.delete(name)) opened.add(name);
  if (shown) draw(shown);
}

function drawModels(overview) {
  const parent = byId("models");
  if (!parent.firstChild) parent.append(table(MODELS));
  const scale = Math.max(1, ...overview.models.map(({ memory }) =>
    memory === null ? 0 : Math.max(memory.total_bytes, memory.without_sharing_bytes)));
  const rows = [];
  for (const model of overview.models) {
    rows.push({ key: `m${model.name}`, model: { ...model, scale } });
    if (opened.has(model.name)) {
      const processes = overview.processes.filter((each) => each.model === model.name);
      rows.push({ key: `p${model.name}`, processes });
    }
  }
  const create = (item) => (item.model ? row(MODELS) : inside());
  const update = (element, item) => {
    if (!item.model) return drawInside(element, item.processes);
    fill(MODELS, element, item.model);
    return element.firstChild.firstChild.setAttribute("aria-expanded", String(opened.has(item.model.name)));
  };
  keyed(parent.firstChild.tBodies[0], rows, (item) => item.key, create, update);
}

function inside() {
  const element = make("tr", "inside");
  const cell = make("td");
  cell.colSpan = MODELS.length;
  cell.append(table(PROCESSES), make("p", "more muted"));
  element.append(cell);
  return element;
}

function drawInside(element, processes) {
  const [inner, more] = element.firstChild.children;
  const some = processes.slice(0, MAX_PROCESSES);
  const update = (line, item) => fill(PROCESSES, line, item);
  keyed(inner.tBodies[0], some, (process) => process.name, () => row(PROCESSES), update);
  inner.hidden = !some.length;
  more.hidden = some.length > 0 && some.length === processes.length;
  write(more, some.length ? `and ${plural(processes.length - some.length, "process")} more` : "no processes");
}

function drawTenants(overview) {
  const parent = byId("tenants");
  // A single tenant needs no table.
  byId("tenants-section").hidden = overview.tenants.length < 2;
  if (!parent.firstChild) parent.append(table(TENANTS));
  const update = (element, item) => fill(TENANTS, element, item);
  keyed(parent.firstChild.tBodies[0], overview.tenants, (tenant) => tenant.name, () => row(TENANTS), update);
}

// --- state and polling ---

let shown = null; // the latest overview
let receivedAt = 0; // when the latest overview was received
let age = 0; // age of the latest overview in ms when it was received
let errorText = ""; // why the page has no newer overview

function draw(overview) {
  shown = overview;
  byId("picture").hidden = false;
  write(byId("service"), `${overview.version}, up ${duration(overview.uptime_s)}`);
  byId("own").hidden = overview.is_complete;
  drawMemory(overview);
  drawThroughput(overview);
  drawModels(overview);
  drawTenants(overview);
}

function drawHealth() {
  const old = shown === null ? 0 : Math.max(0, performance.now() - receivedAt + age);
  const lost = errorText !== "" || (shown !== null && old > FRESH_MS);
  byId("error").hidden = !lost;
  byId("picture").classList.toggle("stale", lost && shown !== null);
  if (lost) {
    write(byId("why"), errorText || "The gateway does not respond.");
    write(byId("since"), shown === null ? "" : `The values below are ${duration(old / 1000)} old.`);
  }
  const health = byId("health");
  if (lost || shown === null) {
    mark(health, "state bad");
    write(health, lost ? "no response" : "");
  } else {
    const ready = shown.models.filter((model) => model.ready).length;
    const all = shown.models.length;
    const failed = shown.models.some((model) => model.state === "failed");
    mark(health, `state ${failed ? "bad" : ready === all ? "good" : "warn"}`);
    write(health, `${shown.state}, ${ready === all ? plural(all, "model") : `${ready} of ${plural(all, "model")}`} ready`);
  }
  const title = `${lost ? "no response" : health.textContent || "waiting"} – weightd`;
  if (document.title !== title) document.title = title;
}

function onStatus(status) {
  byId("access").hidden = true;
  errorText = status.daemon.error;
  if (status.overview !== null) {
    receivedAt = performance.now();
    age = 1000 * status.daemon.age_s;
    draw(status.overview);
  }
}

// Handles an error response of the gateway.
async function onRefused(response) {
  byId("access").hidden = response.status !== 401;
  const answer = await response.json().catch(() => ({}));
  errorText = typeof answer.error === "string" ? answer.error : `The gateway responded with status ${response.status}.`;
}

let next = 0;
let isPolling = false;

async function poll() {
  clearTimeout(next);
  if (isPolling || document.hidden) return;
  isPolling = true;
  const token = sessionStorage.getItem("token");
  try {
    const response = await fetch("status.json", {
      cache: "no-store",
      headers: token ? { Authorization: `Bearer ${token}` } : {},
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    if (response.ok) onStatus(await response.json());
    else await onRefused(response);
  } catch {
    errorText = "The gateway cannot be reached.";
  }
  isPolling = false;
  drawHealth();
  next = setTimeout(poll, POLL_INTERVAL_MS);
}

byId("access").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", byId("token").value.trim());
  byId("token").value = "";
  poll();
});
document.addEventListener("visibilitychange", poll);
setInterval(drawHealth, POLL_INTERVAL_MS);
poll();
