// The question and the pictures that are about to be sent.

import { BadPicture, LIMITS_IN_WORDS, makeSample, readPicture, SAMPLES } from "./pictures.js";
import { checkParameters, showSystem } from "./settings.js";
import { $, announce, complain, say, showPicture } from "./view.js";
import { number, plural } from "./words.js";

const MAX_ROWS_PX = 160;
const BLIND = "This model reads no pictures: ask it in words.";

export class Composer {
  #session = null;
  #reading = Promise.resolve(); // pictures are read one after the other, because large ones need much memory
  #onAsk;

  // onAsk(question, pictures): the user asks. onStop(): the user stops the answer.
  constructor(onAsk, onStop) {
    this.#onAsk = onAsk;
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    $("question").addEventListener("keydown", (event) => {
      const isComposing = event.isComposing || event.keyCode === 229; // the code is Safari's, for the last key
      if (event.key === "Enter" && !event.shiftKey && !isComposing) {
        event.preventDefault();
        this.#submit();
      }
    });
    $("question").addEventListener("input", () => {
      this.#session.draft.text = $("question").value;
      this.#grow();
    });
    $("stop").onclick = onStop;
    $("add").onclick = () => $("file").click();
    $("file").onchange = () => {
      this.add([...$("file").files]);
      $("file").value = ""; // so that the same file can be chosen again
    };
    this.#acceptDrops();
    this.#offerSamples();
  }

  show(session) {
    this.#session = session;
    $("question").value = session.draft.text;
    complain("");
    if (!session.canSee && session.draft.pictures.length) this.#dropPictures();
    this.#grow();
    this.#showPending();
    this.showState();
  }

  // Remove pictures that were chosen for another model.
  #dropPictures() {
    for (const picture of this.#session.draft.pictures) picture.release();
    this.#session.draft.pictures = [];
    complain(BLIND);
  }

  // Show the Ask or the Stop button, and the welcome in a new session.
  showState() {
    const isRunning = Boolean(this.#session.running);
    const hadFocus = document.activeElement;
    $("ask").hidden = isRunning;
    $("stop").hidden = !isRunning;
    if (hadFocus && hadFocus !== document.body && hadFocus.hidden) $("question").focus();
    const { canSee, maxPictures } = this.#session;
    const most = maxPictures === Infinity ? "" : `${number(maxPictures)} per session, `;
    say($("limits"), `Drop or paste pictures anywhere: ${most}${LIMITS_IN_WORDS}`);
    for (const element of document.querySelectorAll(".for-pictures")) element.hidden = !canSee;
    showSystem(this.#session);
    say($("welcome-title"), canSee ? "Ask a model about your pictures" : "Ask a model");
    $("welcome").hidden = this.#session.turns.length > 0;
    this.#showQuestions();
  }

  // Add files, and report those that are not pictures.
  add(files) {
    const session = this.#session;
    if (!session) return this.#reading; // no model is chosen before the first session
    complain(session.canSee ? "" : BLIND);
    if (!session.canSee) return this.#reading;
    this.#reading = this.#reading.then(async () => {
      const problems = [];
      for (const file of files) {
        if (session.numPictures >= session.maxPictures) {
          problems.push(`A session may have ${plural(session.maxPictures, "picture")}; open another for more.`);
          break;
        }
        try {
          const picture = await readPicture(file);
          session.draft.pictures.push(picture);
        } catch (error) {
          problems.push(error instanceof BadPicture ? error.message : `${file.name} cannot be read: ${error.message}`);
        }
      }
      if (session !== this.#session) return;
      this.#showPending();
      if (problems.length) complain(problems.join(" "));
      else announce(`${plural(files.length, "picture")} added.`);
      $("question").focus();
    });
    return this.#reading;
  }

  // Send the question when all chosen pictures have been read, so that they go with it.
  async #submit() {
    const session = this.#session;
    await this.#reading;
    const { draft, running } = session;
    const question = $("question").value.trim();
    if (running || session !== this.#session) return;
    if (!question) {
      complain(draft.pictures.length ? "Type a question about the pictures." : "Type a question.");
      $("question").focus();
      return;
    }
    this.ask(question);
  }

  ask(question) {
    if (!checkParameters()) return;
    const { pictures } = this.#session.draft;
    this.#session.draft = { text: "", pictures: [] };
    $("question").value = "";
    complain("");
    this.#grow();
    this.#showPending();
    this.#onAsk(question, pictures);
    $("question").focus();
  }

  // Put a text into the field, before the text that is there.
  write(text) {
    const { draft } = this.#session;
    draft.text = [text, draft.text].filter(Boolean).join("\n");
    $("question").value = draft.text;
    this.#grow();
    $("question").focus();
  }

  #grow() {
    const box = $("question");
    box.style.height = "auto";
    box.style.height = `${Math.min(MAX_ROWS_PX, box.scrollHeight + 2)}px`;
  }

  #showPending() {
    const { draft } = this.#session;
    $("pending").replaceChildren(
      ...draft.pictures.map((picture) =>
        showPicture(picture, () => {
          draft.pictures.splice(draft.pictures.indexOf(picture), 1);
          picture.release();
          complain("");
          this.#showPending();
          announce(`${picture.name} removed.`);
          $("question").focus();
        })
      )
    );
    $("pending").hidden = !draft.pictures.length;
    this.#showQuestions();
  }

  #acceptDrops() {
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    const mark = (isOver) => $("composer").classList.toggle("dropping", isOver);
    addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      mark(true);
    });
    addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) mark(false);
    });
    addEventListener("drop", (event) => {
      mark(false);
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
    addEventListener("paste", (event) => {
      const { files = [], types = [] } = event.clipboardData ?? {};
      // Office programs add a picture of the text that is copied.
      const isText = types.includes("text/plain") && types.includes("text/html");
      if (!files.length || isText) return;
      event.preventDefault();
      this.add([...files]);
    });
  }

  async #offerSamples() {
    for (const sample of SAMPLES) {
      const picture = await makeSample(sample);
      const [item, button, image] = ["li", "button", "img"].map((tag) => document.createElement(tag));
      Object.assign(image, { src: picture.url, alt: "", width: 96, height: 96 });
      button.type = "button";
      button.append(image, Object.assign(document.createElement("span"), { textContent: `Take ${sample.name}` }));
      button.onclick = async () => {
        for (const each of this.#session.draft.pictures) each.release();
        this.#session.draft.pictures = [await makeSample(sample)];
        this.#session.draft.sample = sample;
        this.#showPending();
        announce(`${sample.name} is ready to be sent. Questions for it follow.`);
        $("questions").querySelector("button").focus();
      };
      item.append(button);
      $("samples").append(item);
    }
  }

  #showQuestions() {
    const { sample, pictures } = this.#session.draft;
    $("questions").hidden = !sample || !pictures.length;
    if ($("questions").hidden) return;
    const list = $("questions").querySelector("ul");
    if (list.dataset.of === sample.name) return;
    list.dataset.of = sample.name;
    list.replaceChildren(
      ...sample.questions.map((question) => {
        const button = Object.assign(document.createElement("button"), { type: "button", textContent: question });
        button.onclick = () => this.ask(question);
        const item = document.createElement("li");
        item.append(button);
        return item;
      })
    );
  }
}
