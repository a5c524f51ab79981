// The list of recent requests, and where the time of one of them went.

import { html, useState } from "./htm-preact-3.1.1.js";
import { bytes, clock, ms, number, plural, sum, ticks } from "./format.js";

const MAX_ROWS = 100;

const STAGES = {
  body: ["body", "admitted, read and checked"],
  queue: ["instance", "until an instance is known, and who encodes"],
  media: ["media", "fetched, decoded, checked and hashed"],
  sizes: ["sizes", "until encoders have said how long the items are"],
  given_up: ["given up", "a way that came to nothing"],
  encode: ["encode", "sent to prefill_decode; until the last item was sealed"],
  prefill: ["prefill", "handover, prefill, first token"],
  answer: ["answer", "prefill and decode of an answer that is not streamed"],
  stream: ["tokens", "from the first token to the last"],
};

const SOURCES = {
  encoded: "encoded",
  joined: "encoded for another request",
  memory: "not encoded: known here",
  redis: "not encoded: known in Redis",
  store: "not encoded: in the store",
};

export const numAvoided = (request) => sum(Object.values(request.avoided));

function State({ request }) {
  const label = request.error ?? STAGES[request.state]?.[0] ?? request.state;
  const kind = request.status === null ? "running" : request.state;
  return html`<span class="state ${kind}"><span class="dot ${kind}"></span>${label}</span>`;
}

export function Requests({ requests, selected, onSelect }) {
  const shown = requests.slice(0, MAX_ROWS);
  return html`<section class="card requests" aria-label="requests">
    <header><h2>Requests</h2><span class="quiet">${plural(requests.length, "recent one")}</span></header>
    <div class="scroll" tabindex="0" aria-label="recent requests">
      <table>
        <thead>
          <tr>
            <th>at</th><th>request</th><th>endpoint</th><th>state</th>
            <th class="n">media</th><th class="n">avoided</th><th class="n">first token</th>
            <th class="n">duration</th><th class="n">tokens</th>
          </tr>
        </thead>
        <tbody>
          ${shown.map((each) => html`<${Row} key=${each.request_id} each=${each}
            is_selected=${each.request_id === selected} onSelect=${onSelect} />`)}
        </tbody>
      </table>
      ${!shown.length && html`<p class="empty quiet">No request yet. Drop an image to send one.</p>`}
    </div>
  </section>`;
}

function Row({ each, is_selected, onSelect }) {
  return html`<tr class=${is_selected ? "selected" : ""} data-request=${each.request_id}
    onClick=${() => onSelect(each.request_id)}>
    <td class="quiet">${clock(each.began_s)}</td>
    <td><button class="link" aria-pressed=${is_selected} title=${each.request_id}>${each.request_id.slice(4, 12)}</button>
      ${each.key_name && html`<span class="quiet"> ${each.key_name}</span>`}</td>
    <td class="quiet">${each.route.replace("/v1/", "")}</td>
    <td><${State} request=${each} /></td>
    <td class="n">${number(each.num_items)}</td>
    <td class="n">${number(numAvoided(each))}</td>
    <td class="n">${ms(each.first_token_ms)}</td>
    <td class="n">${ms(each.duration_ms)}</td>
    <td class="n">${each.num_tokens === null ? "" : number(each.num_tokens)}</td>
  </tr>`;
}

// One row for each stage, with a bar for each time that the request was in it. Bars of no length are left out.
function rowsOf(request) {
  const rows = new Map();
  for (const { stage, from_ms, to_ms } of request.stages) {
    const bars = rows.get(stage) ?? [];
    if (bars.at(-1)?.to_ms === from_ms) bars.at(-1).to_ms = to_ms;
    else bars.push({ from_ms, to_ms });
    rows.set(stage, bars);
  }
  return [...rows]
    .map(([stage, bars]) => [stage, bars.filter((bar) => bar.to_ms - bar.from_ms >= 0.05)])
    .filter(([, bars]) => bars.length);
}

function Bar({ kind, from, to, total, title }) {
  const left = (100 * Math.min(from, total)) / total;
  const width = Math.max(0.3, (100 * (Math.min(to, total) - Math.min(from, total))) / total);
  return html`<span class="bar ${kind}" title=${title}
    style=${{ left: `${Math.min(left, 99.7)}%`, width: `${width}%` }}></span>`;
}

function Item({ item, index, total, until }) {
  const ordered = item.ordered_ms;
  const sealed = item.sealed_ms;
  const began = sealed === null ? null : Math.max(ordered ?? 0, sealed - item.encode_ms);
  const name = `${item.modality} ${index + 1}`;
  const facts = [
    bytes(item.num_bytes),
    item.num_rows && plural(item.num_rows, "row"),
    item.encode_ms > 0 && `encode ${ms(item.encode_ms)}`,
    SOURCES[item.source],
    item.encoder,
    item.num_places > 1 && `${item.num_places} times`,
  ].filter(Boolean);
  return html`<div class="row item" data-item=${index}>
    <span class="label">${name}</span>
    <div class="track">
      ${ordered !== null &&
      html`<${Bar} kind="wait" from=${ordered} to=${began ?? until} total=${total}
        title="ordered; queued, fetched and preprocessed" />`}
      ${item.encode_ms > 0 &&
      html`<${Bar} kind="encode" from=${began} to=${sealed} total=${total} title="encoded and sealed" />`}
    </div>
    <span class="n">${sealed === null || ordered === null ? "" : ms(sealed - ordered)}</span>
    <span class="facts quiet">${facts.join(" · ")}</span>
  </div>`;
}

// By a selection: `navigator.clipboard` is missing where the page comes over plain HTTP from another host.
function CopyButton({ id }) {
  const [copied, setCopied] = useState(null); // the id that was copied last
  const copy = (event) => {
    getSelection().selectAllChildren(event.currentTarget.parentElement.querySelector("code"));
    if (document.execCommand("copy")) setCopied(id);
  };
  return html`<button class="link" title="copy the request id" onClick=${copy}>${copied === id ? "copied" : "copy"}</button>`;
}

export function Waterfall({ request }) {
  if (!request) {
    return html`<section class="card waterfall"><header><h2>Where the time went</h2></header>
      <p class="empty quiet">Choose a request.</p></section>`;
  }
  const total = Math.max(request.duration_ms, 0.1);
  const first = request.first_token_ms;
  const facts = [
    request.model,
    request.instance,
    request.way && `${request.way} encode`,
    request.num_prompt_tokens !== null && `${number(request.num_prompt_tokens)} tokens in`,
    request.num_tokens !== null && `${number(request.num_tokens)} out`,
    request.num_items > 0 && `${plural(numAvoided(request), "encode")} avoided`,
    first !== null && `first token after ${ms(first)}`,
  ].filter(Boolean);
  const at = (time) => ({ left: `${Math.min(100, (100 * time) / total)}%` });
  const axis = ticks(total);
  return html`<section class="card waterfall" aria-label="waterfall" data-of=${request.request_id}>
    <header>
      <h2>Where the time went</h2>
      <${State} request=${request} />
      <code class="right quiet">${request.request_id}</code>
      <${CopyButton} id=${request.request_id} />
    </header>
    <p class="quiet">${facts.join(" · ")}</p>
    <div class="rows">
      ${rowsOf(request).map(([stage, bars]) => {
        const [name, what] = STAGES[stage] ?? [stage, ""];
        return html`<div class="row" key=${stage} data-stage=${stage} title=${what}>
          <span class="label">${name}</span>
          <div class="track">${bars.map((bar) => html`<${Bar} kind=${stage} from=${bar.from_ms} to=${bar.to_ms}
            total=${total} title=${`${ms(bar.to_ms - bar.from_ms)}: ${what}`} />`)}</div>
          <span class="n">${ms(sum(bars.map((bar) => bar.to_ms - bar.from_ms)))}</span>
        </div>`;
      })}
      ${request.items.map((item, index) => html`<${Item} item=${item} index=${index} total=${total}
        until=${first ?? request.duration_ms} />`)}
      <div class="marks"><span></span><div class="track">
        ${axis.map(([time]) => html`<span class="grid" style=${at(time)}></span>`)}
        ${first !== null && html`<span class="mark" style=${at(first)}></span>`}
      </div></div>
    </div>
    <footer class="row axis">
      <span></span>
      <div>${axis.map(([time, label]) => html`<span class="tick quiet" style=${at(time)}>${label}</span>`)}</div>
      <span class="n">${ms(total)}</span>
    </footer>
  </section>`;
}
