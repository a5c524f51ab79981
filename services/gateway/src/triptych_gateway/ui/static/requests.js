// The list of recent requests, and where the time of one of them went.

import { html } from "./htm-preact-3.1.1.js";
import { bytes, clock, ms, number, plural, sum } from "./format.js";

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
    <td class="n">${each.num_items || ""}</td>
    <td class="n">${numAvoided(each) || ""}</td>
    <td class="n">${ms(each.first_token_ms)}</td>
    <td class="n">${ms(each.duration_ms)}</td>
    <td class="n">${each.num_tokens === null ? "" : number(each.num_tokens)}</td>
  </tr>`;
}

// Stages that follow each other under one name are one bar; those of no length are left out.
function barsOf(request) {
  const bars = [];
  for (const each of request.stages) {
    const last = bars.at(-1);
    if (last && last.stage === each.stage) last.to_ms = each.to_ms;
    else bars.push({ ...each });
  }
  return bars.filter((bar) => bar.to_ms - bar.from_ms >= 0.05);
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
    numAvoided(request) > 0 && `${plural(numAvoided(request), "encode")} avoided`,
  ].filter(Boolean);
  return html`<section class="card waterfall" aria-label="waterfall" data-of=${request.request_id}>
    <header>
      <h2>Where the time went</h2>
      <${State} request=${request} />
      <code class="right quiet">${request.request_id}</code>
    </header>
    <p class="quiet">${facts.join(" · ")}</p>
    <div class="rows">
      ${barsOf(request).map((bar) => {
        const [name, what] = STAGES[bar.stage] ?? [bar.stage, ""];
        return html`<div class="row" data-stage=${bar.stage} title=${what}>
          <span class="label">${name}</span>
          <div class="track"><${Bar} kind=${bar.stage} from=${bar.from_ms} to=${bar.to_ms} total=${total} /></div>
          <span class="n">${ms(bar.to_ms - bar.from_ms)}</span>
        </div>`;
      })}
      ${request.items.map((item, index) => html`<${Item} item=${item} index=${index} total=${total}
        until=${first ?? request.duration_ms} />`)}
      ${first !== null &&
      html`<div class="marks"><span></span><div class="track">
        <span class="mark" style=${{ left: `${Math.min(100, (100 * first) / total)}%` }}></span>
      </div></div>`}
    </div>
    <footer class="quiet">
      <span>0</span>
      <span>${first === null ? "" : `first token after ${ms(first)}`}</span>
      <span>${ms(total)}</span>
    </footer>
  </section>`;
}
