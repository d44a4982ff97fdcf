// The page of a running job. It shows what the server pushes, and connects again by itself. Texts of the job are set
// as text, never as markup.
"use strict";

const HISTORY = 120;  // step times that the chart shows, one a second
const AGAIN_MS = 2000;
let history = [];
let source = null;
let isOver = false;

const byId = (id) => document.getElementById(id);

function element(name, text, classes) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (classes) made.className = classes;
  return made;
}

function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) { number /= 1000; unit += 1; }
  return `${unit && number < 100 ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

const rate = (number) => `${bytes(number)}/s`;

function time(seconds) {
  if (seconds === 0) return "–";
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return `${(seconds * 1e3).toFixed(seconds < 0.01 ? 2 : 1)} ms`;
}

// The share of the communication that is hidden, once a step has been timed.
const hidden = (figures) => (figures.step_s ? `${Math.round(figures.hidden_share * 100)} %` : "–");

function connection(state, text) {
  const shown = byId("connection");
  shown.dataset.state = state;
  shown.textContent = text;
  document.body.classList.toggle("stale", state !== "live");
}

function connect() {
  if (source !== null) source.close();
  source = new EventSource("events");
  source.addEventListener("history", (message) => { history = JSON.parse(message.data); });
  source.onmessage = (message) => show(JSON.parse(message.data));
  source.onerror = () => {
    if (isOver) { source.close(); return; }
    connection("connecting", "no connection to the launcher, connecting again …");
    // The browser itself connects again after a lost connection, and gives up after an answer that is an error.
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, AGAIN_MS);
  };
}

function show(job) {
  isOver = job.is_over;
  if (isOver) connection("over", "the job has ended: these are its last figures");
  else connection("live", "live");
  document.title = `${job.step ? `step ${job.step} · ` : ""}totalreduce`;
  byId("command").textContent = job.command;
  cards(job);
  chart(job);
  ranks(job);
  links(job);
  training(job);
  happened(job);
}

function cards(job) {
  const running = job.ranks.filter((row) => row.state === "running").length;
  const shown = [
    ["ranks", `${running} of ${job.world_size}`], ["membership", job.epoch], ["step", job.step.toLocaleString("en")],
    ["step time", time(job.step_s)], ["computing", time(job.compute_s)], ["exposed", time(job.exposed_s)],
    ["hidden", hidden(job)], ["sent by all", rate(job.sent_per_s)],
  ];
  byId("cards").replaceChildren(...shown.map(([name, value]) => {
    const card = element("div", undefined, "card");
    card.dataset.name = name;
    card.append(element("b", value), element("span", name));
    return card;
  }));
}

function chart(job) {
  if (!job.is_over) history.push([job.compute_s, job.exposed_s]);
  if (history.length > HISTORY) history.shift();
  const svg = byId("chart");
  const top = Math.max(...history.map(([compute, exposed]) => compute + exposed), 1e-9);
  svg.setAttribute("viewBox", `0 0 ${HISTORY} 100`);
  const bars = [];
  history.forEach(([compute, exposed], index) => {
    let bottom = 100;
    for (const [value, name] of [[compute, "compute"], [exposed, "exposed"]]) {
      const height = value / top * 100;
      const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      const place = { x: HISTORY - history.length + index, y: bottom - height, width: 0.8, height };
      for (const [key, number] of Object.entries(place)) bar.setAttribute(key, number);
      bar.setAttribute("class", name);
      bars.push(bar);
      bottom -= height;
    }
  });
  svg.replaceChildren(...bars);
  byId("scale").textContent = `the last ${HISTORY / 60} minutes; the highest bar is ${time(top)}`;
}

function ranks(job) {
  const longest = Math.max(...job.ranks.map((row) => row.step_s), 1e-9);
  byId("ranks").tBodies[0].replaceChildren(...job.ranks.map((row) => {
    const line = element("tr", undefined, row.is_late ? "late" : "");
    line.dataset.seat = row.seat;
    line.dataset.state = row.state;
    const bar = element("div", undefined, "bar");
    for (const [value, name] of [[row.compute_s, "compute"], [row.exposed_s, "exposed"]]) {
      const part = element("i", undefined, name);
      part.style.width = `${value / longest * 100}%`;
      bar.append(part);
    }
    const share = element("td");
    share.title = `${time(row.compute_s)} computing, ${time(row.exposed_s)} exposed`;
    share.append(bar);
    const restarts = row.incarnation ? `started again ${row.incarnation}×` : "";
    line.append(
      element("td", row.seat), element("td", row.rank === null ? "–" : row.rank), element("td", row.host),
      element("td", row.state, `state-${row.state.replace(" ", "-")}`), element("td", row.step, "number"),
      element("td", time(row.step_s), "number"), share, element("td", hidden(row), "number"),
      element("td", rate(row.sent_per_s), "number"), element("td", rate(row.received_per_s), "number"),
      element("td", [row.note, restarts].filter(Boolean).join("; ")),
    );
    return line;
  }));
  byId("late").textContent = job.late.map((late) => `Seat ${late.seat} ${late.why}.`).join(" ");
}

function links(job) {
  byId("no-links").hidden = job.links.length > 0;
  byId("links").hidden = job.links.length === 0;
  byId("links").tBodies[0].replaceChildren(...job.links.map((link) => {
    const line = element("tr");
    line.append(
      element("td", `rank ${link.sender}`), element("td", `rank ${link.receiver}`),
      element("td", rate(link.per_s), "number"), element("td", bytes(link.total), "number"),
    );
    return line;
  }));
}

function training(job) {
  const lines = [];
  for (const [name, figures] of Object.entries(job.training)) {
    for (const [figure, value] of Object.entries(figures)) {
      const line = element("tr");
      const shown = typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(3) : value;
      line.append(element("td", name), element("td", figure.replaceAll("_", " ")), element("td", shown, "number"));
      lines.push(line);
    }
  }
  byId("no-training").hidden = lines.length > 0;
  byId("training").tBodies[0].replaceChildren(...lines);
}

function happened(job) {
  byId("faults").replaceChildren(...Object.entries(job.faults).map(([name, count]) => {
    const entry = element("div", undefined, count ? "some" : "");
    entry.dataset.name = name;
    entry.append(element("dt", name.replaceAll("_", " ")), element("dd", count));
    return entry;
  }));
  byId("no-events").hidden = job.events.length > 0;
  byId("events").replaceChildren(...job.events.slice().reverse().map((event) => {
    const line = element("li");
    line.dataset.event = event.event;
    line.append(element("time", new Date(event.time * 1e3).toLocaleTimeString("en-GB")), element("span", event.text));
    return line;
  }));
}

connect();
