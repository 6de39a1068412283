/** Requests to the service. Whatever goes wrong becomes a Problem, which a person can read. */

const KEY = "mass-api-key";
const TITLES = {
  400: "This input cannot be answered",
  401: "This service needs a key",
  408: "The input took too long to arrive",
  413: "This is more than the service accepts",
  415: "This type of file is not supported",
  422: "This input cannot be answered",
  429: "Too many requests right now",
  503: "The service is busy",
};
const TITLES_OF_CODES = {
  not_ready: "The bundle is being loaded",
  stopping: "The service is stopping",
  timeout: "No answer in time",
};

/** What went wrong: a title and a sentence, and if the server said so, after how many seconds to try again. */
export class Problem extends Error {
  constructor(title, message, { status = 0, code = "", retryAfter = null } = {}) {
    super(message.charAt(0).toUpperCase() + message.slice(1));
    Object.assign(this, { title, status, code, retryAfter });
  }
}

let key = stored((store) => store.getItem(KEY)) ?? "";

/** Use a key from now on; it is kept for this tab only, so that loading the page anew does not ask again. */
export function setKey(value) {
  key = value;
  stored((store) => store.setItem(KEY, value));
}

/** What the tab's store gives; nothing where the browser does not allow one. */
function stored(use) {
  try {
    return use(sessionStorage);
  } catch {
    return null;
  }
}

export const hasKey = () => key !== "";

export const getBundle = () => request("v1/bundle");

export const getTraffic = (signal) => request("v1/traffic", { signal });

/**
 * Ask for one answer with its reasons.
 *
 * @param {{text: string}|{image: Blob, name: string}} input
 * @param {{task: string, top: number, signal: AbortSignal}} options an empty task is to be found
 */
export async function predict(input, { task, top, signal }) {
  const began = performance.now();
  const options = { explain: true, top_k: top, ...(task ? { task } : {}) };
  const answer = await request("v1/predict", { method: "POST", signal, ...bodyOf(input, options) });
  const [prediction] = answer.predictions;
  if (prediction.error) throw new Problem(TITLES[422], prediction.error.message, { status: 422, ...prediction.error });
  return { ...prediction, request_id: answer.request_id, seen_ms: performance.now() - began };
}

/** Ask for the task alone; in a service that only routes there is nothing else. */
export async function route(input, { top, signal }) {
  const body = "text" in input ? { text: input.text } : { image: await dataUrl(input.image) };
  const asked = json({ inputs: [body], top_k: top });
  const answer = await request("v1/route", { method: "POST", signal, ...asked });
  const [found] = answer.routes;
  if (found.error) throw new Problem(TITLES[422], found.error.message, { status: 422, ...found.error });
  return { ...found, request_id: answer.request_id };
}

/** The body of a request for a text that is streamed. */
export function writeBody({ text }, task, bundle) {
  const asked = bundle.chat ? { messages: [{ role: "user", content: text }] } : { prompt: text };
  return { model: task || bundle.name, ...asked, stream: true, stream_options: { include_usage: true } };
}

export const writePath = (bundle) => (bundle.chat ? "v1/chat/completions" : "v1/completions");

/**
 * The events of a text while it is written.
 *
 * @param {{text: string}} input
 * @param {{task: string, bundle: object, signal: AbortSignal}} options an empty task is to be found
 */
export async function* write(input, { task, bundle, signal }) {
  const response = await send(writePath(bundle), { method: "POST", signal, ...json(writeBody(input, task, bundle)) });
  for await (const line of linesOf(response.body)) {
    if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
    const event = JSON.parse(line.slice("data: ".length));
    if (event.error) throw problemOf(response, event);
    yield event;
  }
}

async function* linesOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Problem("The answer broke off", "The connection to the server was lost.");
    });
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines;
  }
}

const json = (body) => ({ body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Problem("This image cannot be read", "The file may have been removed."));
    reader.readAsDataURL(blob);
  });
}

function bodyOf(input, options) {
  if ("text" in input) {
    return json({ inputs: [{ text: input.text }], ...options });
  }
  const form = new FormData();
  form.append("image", input.image, input.name);
  Object.entries(options).forEach(([name, value]) => form.append(name, String(value)));
  return { body: form };
}

async function request(path, options = {}) {
  const response = await send(path, options);
  const body = await response.json().catch(() => null);
  if (body) return body;
  throw problemOf(response, body);
}

/** A response that is no error. */
async function send(path, options) {
  const headers = { Accept: "application/json", ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server cannot be reached", "It may have been stopped, or the network is down.");
  }
  if (response.ok) return response;
  throw problemOf(response, await response.json().catch(() => null));
}

function problemOf(response, body) {
  const { status } = response;
  const { code = "", message = "" } = body?.error ?? {};
  const other = status >= 500 ? "Internal error of the service" : "That did not work";
  const title = TITLES_OF_CODES[code] ?? TITLES[status] ?? other;
  const wait = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
  return new Problem(title, message || `The server answered with status ${status}.`, {
    status, code, retryAfter: Number.isNaN(wait) ? null : wait,
  });
}
