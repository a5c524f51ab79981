// An image is dropped, a question asked, and the answer read as it streams. Nothing of it is kept.

import { html, useEffect, useRef, useState } from "./htm-preact-3.1.1.js";
import { headers, messageOf, readEvents } from "./data.js";
import { bytes } from "./format.js";

const MAX_BYTES = 20 << 20;
const MAX_TOKENS = 256;
const QUESTION = "read the digits"; // the documents' example: the demo model has learned it

function readDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("the image cannot be read"));
    reader.readAsDataURL(file);
  });
}

// Calls `onText` with what comes, and `onRequest` with the id that the gateway gave it.
async function ask({ model, question, image, signal, onText, onRequest }) {
  const content = [{ type: "text", text: question }];
  if (image) content.unshift({ type: "image_url", image_url: { url: await readDataUrl(image) } });
  const body = {
    model,
    messages: [{ role: "user", content }],
    max_tokens: MAX_TOKENS,
    temperature: 0,
    stream: true,
    stream_options: { include_usage: true },
  };
  const answer = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  onRequest(answer.headers.get("X-Request-Id"));
  if (!answer.ok) throw new Error(await messageOf(answer));
  await readEvents(answer, (_, data) => {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    onText(event.choices?.[0]?.delta?.content ?? "");
  });
}

export function Ask({ models, onRequest }) {
  const [image, setImage] = useState(null); // { file, url, error }: with an error nothing is sent
  const [question, setQuestion] = useState(QUESTION);
  const [chosen, setModel] = useState("");
  const [answer, setAnswer] = useState(null); // { text, error, is_running }
  const [is_over, setIsOver] = useState(false);
  const running = useRef(null);
  const input = useRef(null);
  const model = models.includes(chosen) ? chosen : models[0];

  function take(file) {
    if (!file) return;
    let error = "";
    if (!file.type.startsWith("image/")) error = "This file is not an image";
    else if (file.size > MAX_BYTES) error = `This image has more than ${bytes(MAX_BYTES)}`;
    replaceImage({ file, url: error ? null : URL.createObjectURL(file), error });
  }

  function replaceImage(next) {
    if (image?.url) URL.revokeObjectURL(image.url);
    setImage(next);
    setAnswer(null);
    input.current.value = ""; // the same file can be chosen again
  }

  async function send(event) {
    event.preventDefault();
    const abort = new AbortController();
    running.current = abort;
    let text = "";
    setAnswer({ text, error: "", is_running: true });
    try {
      await ask({
        model,
        question,
        image: image?.file,
        signal: abort.signal,
        onRequest,
        onText: (more) => {
          text += more;
          setAnswer({ text, error: "", is_running: true });
        },
      });
      setAnswer({ text, error: "", is_running: false });
    } catch (error) {
      setAnswer({ text, error: abort.signal.aborted ? "stopped" : error.message, is_running: false });
    }
  }

  // Anywhere on the page: a file that misses the frame would else replace the page.
  const dropped = useRef(null);
  dropped.current = take;
  useEffect(() => {
    const listeners = {
      dragover: (event) => {
        event.preventDefault();
        setIsOver(true);
      },
      dragleave: (event) => {
        if (!event.relatedTarget) setIsOver(false);
      },
      drop: (event) => {
        event.preventDefault();
        setIsOver(false);
        dropped.current(event.dataTransfer.files[0]);
      },
    };
    for (const [name, listener] of Object.entries(listeners)) window.addEventListener(name, listener);
    return () => {
      for (const [name, listener] of Object.entries(listeners)) window.removeEventListener(name, listener);
    };
  }, []);

  return html`<section class="card ask" aria-label="ask">
    <header><h2>Ask</h2></header>
    <form onSubmit=${send}>
      <div class="drop ${is_over ? "over" : ""}">
        ${!image && html`<span class="quiet">Drop an image here</span>`}
        ${image?.url && html`<img src=${image.url} alt=${image.file.name} />`}
        ${image?.error &&
        html`<p class="error" role="alert">${image.error}; nothing is sent. Choose an image, or remove the file.</p>`}
        <button type="button" class="link" onClick=${() => input.current.click()}>
          ${image ? `${image.file.name} · ${bytes(image.file.size)} · change` : "or choose one"}
        </button>
        ${image && html`<button type="button" class="link" onClick=${() => replaceImage(null)}>remove</button>`}
        <input ref=${input} type="file" accept="image/*" hidden
          onChange=${(event) => take(event.target.files[0])} />
      </div>
      <label>Question
        <textarea rows="2" value=${question} onInput=${(event) => setQuestion(event.target.value)}></textarea>
      </label>
      ${models.length > 1 &&
      html`<label>Model
        <select value=${model} onChange=${(event) => setModel(event.target.value)}>
          ${models.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
        </select></label>`}
      ${answer?.is_running
        ? html`<button type="button" onClick=${() => running.current?.abort()}>Stop</button>`
        : html`<button class="main" disabled=${!model || !question.trim() || image?.error}>Ask</button>`}
    </form>
    ${answer &&
    html`<div class="answer" aria-live="polite" data-state=${answer.is_running ? "running" : "ended"}>
      ${answer.text && html`<p class="text">${answer.text}</p>`}
      ${answer.is_running && !answer.text && html`<p class="quiet">waiting for the first token</p>`}
      ${answer.error && html`<p class="error" role="alert">${answer.error}</p>`}
    </div>`}
  </section>`;
}
