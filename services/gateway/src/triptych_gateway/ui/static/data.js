// What the gateway sends: one stream of server-sent events, read by fetch, so that the key is in a header and
// never in a URL. EventSource could not send it.

const KEY = "triptych-key";
const RETRY_MS = 2000;

export const readKey = () => sessionStorage.getItem(KEY) ?? "";

export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export function headers(more = {}) {
  const key = readKey();
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

// Calls `onEvent(name, data)` for each event of an answer, until its end.
export async function readEvents(answer, onEvent) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      let name = "message";
      let data = "";
      for (const line of event.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (data) onEvent(name, data);
    }
  }
}

// What an error answer says.
export async function messageOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the gateway answered ${answer.status}`;
  }
}

// Follows the gateway until `signal` is aborted. `onState`: `live`, `key`, or `away`, with a message.
export async function follow(onEvent, onState, signal) {
  while (!signal.aborted) {
    try {
      const answer = await fetch("ui/api/events", { headers: headers(), signal, cache: "no-store" });
      if (answer.status === 401) {
        onState("key", readKey() ? await messageOf(answer) : "");
        return;
      }
      if (!answer.ok) throw new Error(await messageOf(answer));
      onState("live", "");
      await readEvents(answer, (name, data) => onEvent(name, JSON.parse(data)));
      onState("away", "the gateway ended the connection");
    } catch (error) {
      if (signal.aborted) return;
      onState("away", error.message);
    }
    await new Promise((resume) => setTimeout(resume, RETRY_MS));
  }
}
