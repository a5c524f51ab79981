// The system as a row of stages, each with its instances and what they have to do.

import { html } from "./htm-preact-3.1.1.js";
import { bytes, number, percent, plural, sum } from "./format.js";

function Meter({ value, max, label, kind = "" }) {
  const full = max ? Math.min(100, (100 * value) / max) : 0;
  return html`<div class="meter ${kind}" role="img" aria-label=${label}>
    <span style=${{ width: `${full}%` }}></span>
  </div>`;
}

function Instance({ each, own }) {
  const state = each.away ? "away" : each.draining ? "draining" : "ready";
  const has_load = each.num_busy !== null && each.num_busy !== undefined && !each.away;
  const load = has_load ? (each.num_slots ? `${each.num_busy} / ${each.num_slots}` : `${each.num_busy}`) : "";
  return html`<li class="instance" data-instance=${each.instance}>
    <div class="line">
      <span class="dot ${state}" title=${state}></span>
      <span class="name">${each.instance}</span>
      ${own && html`<span class="quiet">this one</span>`}
      <span class="right quiet">${state === "ready" ? load : state}</span>
    </div>
    ${has_load && html`<${Meter} value=${each.num_busy} max=${each.num_slots} label="busy: ${load}" />`}
  </li>`;
}

function Stage({ title, note, children }) {
  return html`<section class="stage card">
    <header><h3>${title}</h3><span class="quiet">${note}</span></header>
    ${children}
  </section>`;
}

function Store({ store }) {
  if (!store) return html`<p class="quiet">Its socket is not on this gateway's host.</p>`;
  const used = store.num_bytes - store.free_bytes;
  const parts = [
    ["pinned", store.pinned_bytes],
    ["ready", store.ready_bytes],
    ["writing", store.writing_bytes],
  ];
  return html`<div class="store">
    <div class="line">
      <span class="name">${bytes(used)}</span>
      <span class="quiet">of ${bytes(store.num_bytes)}</span>
      <span class="right quiet">${percent(used, store.num_bytes)} %</span>
    </div>
    <div class="meter" role="img" aria-label="${percent(used, store.num_bytes)} percent are used">
      ${parts.map(
        ([name, size]) =>
          html`<span class=${name} style=${{ width: `${(100 * size) / store.num_bytes}%` }}></span>`,
      )}
    </div>
    <p class="quiet">${plural(store.num_entries, "tensor")} · ${plural(store.num_pins, "pin")}</p>
    <p class="quiet">${number(store.num_hits)} hits · ${plural(store.num_evictions, "eviction")}</p>
    ${store.slab_bytes > 0 &&
    html`<p class="quiet">GPU: ${bytes(store.slab_bytes - store.slab_free_bytes)} of ${bytes(store.slab_bytes)}</p>`}
  </div>`;
}

export function System({ system, instances }) {
  const load = system.load;
  const of = (stage) => instances.filter((each) => each.stages.includes(stage));
  const list = (stage) =>
    html`<ul>
      ${of(stage).map(
        (each) => html`<${Instance} key=${each.instance} each=${each} own=${each.instance === system.gateway} />`,
      )}
      ${!of(stage).length && html`<li class="quiet">none is registered</li>`}
    </ul>`;
  const waiting = load ? sum(load.queues.map((each) => each.num_waiting)) : 0;
  const oldest = load ? Math.max(0, ...load.queues.map((each) => each.oldest_s)) : 0;
  return html`<section class="flow" aria-label="system">
    <${Stage} title="Gateway" note=${system.redis ? "" : "Redis is away"}>
      ${list("gateway")}
      ${load &&
      html`<p class="quiet">${bytes(load.media_bytes)} of media in hand</p>
        <p class="quiet">sizes of ${plural(load.num_sizes, "item")} known</p>`}
    <//>
    <span class="arrow" aria-hidden="true"></span>
    <${Stage} title="Encode" note=${load ? `${plural(waiting, "job")} waiting` : ""}>
      ${list("encode")} ${oldest > 1 && html`<p class="quiet">the oldest job is ${oldest.toFixed(0)} s old</p>`}
    <//>
    <span class="arrow" aria-hidden="true"></span>
    ${load && html`<${Stage} title="Store" note=""><${Store} store=${load.store} /><//>
      <span class="arrow" aria-hidden="true"></span>`}
    <${Stage} title="Prefill and decode" note="">${list("prefill_decode")}<//>
  </section>`;
}
