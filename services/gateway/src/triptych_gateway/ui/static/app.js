// The page: what the gateway sends is kept here, and drawn by the parts.

import { html, render, useEffect, useMemo, useReducer, useState } from "./htm-preact-3.1.1.js";
import { Ask } from "./ask.js";
import { follow, keepKey, readKey } from "./data.js";
import { median, ms, number, percent, sum } from "./format.js";
import { numAvoided, Requests, Waterfall } from "./requests.js";
import { System } from "./system.js";

const MAX_REQUESTS = 1000;
const LEVELS = ["memory", "redis", "store", "joined", "repeated"];
const EMPTY = { system: null, requests: new Map(), seen: new Map() };

// `seen`: every instance since the page was opened, so that one that has gone is seen to be away.
function reduce(state, [name, data]) {
  const requests = name === "snapshot" ? new Map() : new Map(state.requests);
  const system = name === "system" ? data : name === "snapshot" ? data.system : state.system;
  const changed = name === "requests" ? data : name === "snapshot" ? data.requests : [];
  for (const each of changed) requests.set(each.request_id, each);
  for (const id of requests.keys()) {
    if (requests.size <= MAX_REQUESTS) break;
    requests.delete(id);
  }
  if (name === "clear") return EMPTY;
  const seen = new Map(state.seen);
  for (const [id, each] of seen) seen.set(id, { ...each, away: true });
  for (const each of system?.instances ?? []) seen.set(each.instance, each);
  return { system, requests, seen };
}

function Totals({ system, requests }) {
  const since = system.since_start ?? {
    num_requests: requests.filter((each) => each.status !== null).length,
    num_items: sum(requests.map((each) => each.num_items)),
    avoided: Object.fromEntries(
      LEVELS.map((level) => [level, sum(requests.map((each) => each.avoided[level] ?? 0))]),
    ),
  };
  const avoided = sum(Object.values(since.avoided));
  const first = median(requests.map((each) => each.first_token_ms).filter((each) => each !== null));
  const running = requests.filter((each) => each.status === null).length;
  const span = system.since_start ? "since the start" : "of the recent ones";
  return html`<section class="totals" aria-label="totals">
    <div class="card"><b>${number(running)}</b><span>running</span></div>
    <div class="card"><b>${number(since.num_requests)}</b><span>requests ended, ${span}</span></div>
    <div class="card"><b>${first === null ? "–" : ms(first)}</b><span>median time to first token</span></div>
    <div class="card wide">
      <b>${number(avoided)} of ${number(since.num_items)}</b>
      <span>encodes avoided${since.num_items ? ` (${percent(avoided, since.num_items)} %)` : ""}</span>
      <div class="levels">
        ${LEVELS.map(
          (level) => html`<span key=${level} class="level ${level}"><i></i>${level} ${number(since.avoided[level] ?? 0)}</span>`,
        )}
      </div>
    </div>
  </section>`;
}

function KeyForm({ message, onKey }) {
  const [key, setKey] = useState("");
  const submit = (event) => {
    event.preventDefault();
    onKey(key.trim());
  };
  return html`<form class="card key" onSubmit=${submit}>
    <h2>API key</h2>
    <p class="quiet">The page keeps it in this tab, until the tab is closed.</p>
    <input type="password" autocomplete="off" aria-label="API key" value=${key}
      onInput=${(event) => setKey(event.target.value)} />
    <button class="main" disabled=${!key.trim()}>Show</button>
    ${message && html`<p class="error" role="alert">${message}</p>`}
  </form>`;
}

function App() {
  const [state, dispatch] = useReducer(reduce, EMPTY);
  const [link, setLink] = useState({ state: "connecting", message: "" });
  const [generation, setGeneration] = useState(0); // of the key
  const [selected, setSelected] = useState(null);
  useEffect(() => {
    const abort = new AbortController();
    follow(
      (name, data) => dispatch([name, data]),
      (name, message) => setLink({ state: name, message }),
      abort.signal,
    );
    return () => abort.abort();
  }, [generation]);
  const setKey = (key) => {
    keepKey(key);
    dispatch(["clear"]);
    setGeneration((before) => before + 1);
  };
  const requests = useMemo(
    () => [...state.requests.values()].sort((a, b) => b.began_s - a.began_s),
    [state.requests],
  );
  const { system } = state;
  const shown = state.requests.get(selected) ?? requests.find((each) => each.num_items > 0) ?? requests[0];
  return html`
    <header class="top">
      <img src="ui/icon.svg" alt="" width="22" height="22" />
      <h1>Triptych</h1>
      ${system && html`<span class="quiet">${system.models.join(", ")}</span>`}
      <a href="docs">API documentation</a>
      <span class="link-state ${link.state}" title=${link.message}>
        <span class="dot ${link.state === "live" ? (system?.ready ? "ready" : "draining") : "away"}"></span>
        ${link.state === "live" ? (system?.ready ? "live" : "not ready") : link.state === "key" ? "no key" : link.state}
      </span>
      ${readKey() && html`<button class="link" onClick=${() => setKey("")}>forget the key</button>`}
    </header>
    ${link.state === "key"
      ? html`<${KeyForm} message=${link.message} onKey=${setKey} />`
      : system &&
        html`<main>
          <${System} system=${system} instances=${[...state.seen.values()]} />
          <${Totals} system=${system} requests=${requests} />
          <div class="columns">
            <div>
              <${Requests} requests=${requests} selected=${shown?.request_id} onSelect=${setSelected} />
              <${Waterfall} request=${shown} />
            </div>
            <${Ask} models=${system.models} onRequest=${setSelected} />
          </div>
        </main>`}
    ${link.state === "away" && html`<p class="banner" role="status">${link.message}; trying again</p>`}
  `;
}

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
