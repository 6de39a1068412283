/** The form: what is asked, by keyboard, file, drop, paste or example. */

import { Problem } from "./api.js";
import { byId, bytes, el, shorten, whole } from "./dom.js";

const OVERHEAD = 4096; // bytes of a request beside its image
const WARN = 0.8; // share of the longest text from which on characters are counted

/** Reads the form and hands over what is to be asked. */
export class Ask {
  /**
   * @param {object} bundle what `v1/bundle` says
   * @param {{ask: (input: object, task: string) => void, fail: (problem: Problem) => void}} heard
   */
  constructor(bundle, { ask, fail }) {
    this.image = bundle.kind === "image";
    this.limits = bundle.limits ?? {};
    this.input = null;
    this.heard = { ask, fail };
    byId(this.image ? "image-input" : "text-input").hidden = false;
    byId("task").append(...bundle.tasks.map(({ name }) => el("option", { value: name }, name)));
    byId("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    if (this.image) this.#listenForImages();
    else this.#listenForText();
    this.#offer(bundle.examples ?? []);
  }

  /** Ask what the form holds. */
  submit() {
    const input = this.image ? this.input : { text: byId("text").value };
    if (!input || input.text?.trim() === "") {
      const wanted = this.image ? "Choose an image first." : "Type a text first.";
      this.heard.fail(new Problem("Nothing to ask yet", wanted, { status: 422 }));
      byId(this.image ? "file" : "text").focus();
      return;
    }
    this.heard.ask(input, byId("task").value);
  }

  /** Put something that was asked before back into the form. */
  restore(input, task) {
    byId("task").value = task;
    if (input.text !== undefined) {
      byId("text").value = input.text;
      this.#count();
    } else this.#preview(input);
  }

  // Text

  #listenForText() {
    const field = byId("text");
    field.addEventListener("input", () => this.#count());
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.submit();
    });
    // A file dropped beside the field would replace the page.
    document.addEventListener("dragover", (event) => hasFile(event) && event.preventDefault());
    document.addEventListener("drop", (event) => {
      if (!hasFile(event)) return;
      event.preventDefault();
      const instead = "Files are not supported here. Paste the text instead.";
      this.heard.fail(new Problem("This bundle answers text", instead, { status: 415 }));
    });
  }

  #count() {
    const { length } = byId("text").value;
    const most = this.limits.characters ?? Infinity;
    byId("count").textContent = length > WARN * most ? `${whole(length)} of ${whole(most)} characters` : "";
  }

  // Images

  #listenForImages() {
    const zone = byId("drop");
    byId("file").addEventListener("change", ({ target }) => {
      if (target.files.length) this.#take(target.files[0]);
      target.value = ""; // so that the same file can be chosen again
    });
    document.addEventListener("dragover", (event) => {
      event.preventDefault();
      zone.classList.add("over");
    });
    document.addEventListener("dragleave", (event) => event.relatedTarget || zone.classList.remove("over"));
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      zone.classList.remove("over");
      this.#takeFrom(event.dataTransfer, "The dropped item is not an image.");
    });
    document.addEventListener("paste", (event) => {
      if (event.target.matches?.("input:not([type=file])")) return; // the key's field
      this.#takeFrom(event.clipboardData, "The clipboard holds no image.");
    });
  }

  #takeFrom(transfer, none) {
    const [file] = transfer?.files ?? [];
    if (file) this.#take(file);
    else this.heard.fail(new Problem("No image", none, { status: 422 }));
  }

  /** An image is asked as soon as it is there. */
  #take(file) {
    const most = this.limits.body_bytes ?? Infinity;
    if (file.size + OVERHEAD > most) {
      // Sent all the same, the server would hang up half way, and the browser would know no reason.
      const message = `The file ${file.name} has ${bytes(file.size)}; the limit is ${bytes(most)}.`;
      this.heard.fail(new Problem("This image is too large", message, { status: 413 }));
      return;
    }
    this.#preview({ image: file, name: file.name || "pasted image", url: URL.createObjectURL(file) });
    this.submit();
  }

  #preview(input) {
    this.input = input;
    const preview = byId("preview");
    preview.hidden = false;
    preview.onerror = () => {
      preview.hidden = true; // broken, or of a kind that only the server can read
      URL.revokeObjectURL(input.url);
      input.url = null;
    };
    preview.src = input.url ?? "";
    preview.hidden = !input.url;
    byId("file-name").textContent = input.name;
    byId("file-hint").textContent = "choose, drop or paste another";
  }

  // Examples

  #offer(examples) {
    byId("examples").hidden = examples.length === 0;
    byId("example-list").classList.toggle("pictures", this.image);
    byId("example-list").append(...examples.map((example, index) => el("li", {},
      el("button", { type: "button", onclick: () => this.#useExample(example, index + 1) },
        this.image
          ? el("img", { src: example.image, alt: `Example ${index + 1}`, loading: "lazy" })
          : shorten(example.text, 110),
      ))));
  }

  #useExample(example, place) {
    if (this.image) {
      const image = blobOf(example.image);
      this.#preview({ image, name: `example ${place}`, url: URL.createObjectURL(image) });
    } else {
      byId("text").value = example.text;
      this.#count();
    }
    this.submit();
  }
}

const hasFile = (event) => event.dataTransfer?.types.includes("Files");

/** A data URL as what it holds; the page may not fetch it. */
function blobOf(url) {
  const [head, data] = url.split(",", 2);
  const raw = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  return new Blob([raw], { type: head.slice("data:".length).split(";")[0] });
}
