// Reads users' pictures, and scales or converts those that cannot be sent unchanged.

import { newInvocationId } from "./api.js";
import { bytes } from "./words.js";

export const MAX_SIDE = 1600; // pixels; no model here sees more
const MAX_SENT_BYTES = 1 << 20;
const MAX_FILE_BYTES = 64 << 20;
const SENT_AS_THEY_ARE = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const QUALITY = 0.9;

export const LIMITS_IN_WORDS = `up to ${bytes(MAX_FILE_BYTES)} each. Above ${MAX_SIDE} pixels or ${bytes(MAX_SENT_BYTES)} they are scaled down before they are sent.`;

export class BadPicture extends Error {
  name = "BadPicture";
}

// url: valid until `release`. note: how the picture was changed, or "". key: the same in every tab.
class Picture {
  constructor(name, blob, width, height, note, key = newInvocationId()) {
    Object.assign(this, { name, blob, width, height, note, key, url: URL.createObjectURL(blob) });
  }

  get description() {
    return `${this.name}, ${this.width} × ${this.height}${this.note ? `, ${this.note}` : ""}`;
  }

  // The same picture with a URL of its own, for another session.
  copy() {
    return restorePicture(this);
  }

  // The fields that can be stored, without the URL.
  get record() {
    const { name, blob, width, height, note, key } = this;
    return { name, blob, width, height, note, key };
  }

  release() {
    URL.revokeObjectURL(this.url);
  }

  dataUrl() {
    return new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(new BadPicture(`${this.name} can no longer be read.`));
      reader.readAsDataURL(this.blob);
    });
  }
}

export function restorePicture({ name, blob, width, height, note, key }) {
  return new Picture(name, blob, width, height, note, key);
}

// Throws BadPicture.
export async function readPicture(file) {
  const name = file.name || "picture";
  if (file.size > MAX_FILE_BYTES) {
    throw new BadPicture(`${name} has ${bytes(file.size)}; a picture may have up to ${bytes(MAX_FILE_BYTES)}.`);
  }
  const image = new Image();
  const url = URL.createObjectURL(file);
  try {
    image.src = url;
    await image.decode();
  } catch {
    throw new BadPicture(`${name} is not a picture that this browser can read. Try a PNG, JPEG, WebP or GIF.`);
  } finally {
    URL.revokeObjectURL(url);
  }
  const { naturalWidth: width, naturalHeight: height } = image;
  const isLarge = Math.max(width, height) > MAX_SIDE || file.size > MAX_SENT_BYTES;
  if (!isLarge && SENT_AS_THEY_ARE.includes(file.type)) return new Picture(name, file, width, height, "");
  const scale = Math.min(1, MAX_SIDE / Math.max(width, height));
  const canvas = makeCanvas(Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale)));
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  const blob = await encode(canvas, "image/jpeg", name);
  const note = scale < 1 ? `scaled down from ${width} × ${height}` : `sent as JPEG, ${bytes(blob.size)}`;
  return new Picture(name, blob, canvas.width, canvas.height, note);
}

function makeCanvas(width, height, background = "white") {
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d");
  pen.fillStyle = background;
  pen.fillRect(0, 0, width, height);
  return canvas;
}

function encode(canvas, type, name) {
  return new Promise((resolve, reject) => {
    const take = (blob) => (blob ? resolve(blob) : reject(new BadPicture(`${name} is too large for this browser.`)));
    canvas.toBlob(take, type, QUALITY);
  });
}

// Sample pictures that suit the demo model, and questions that it answers well.

export const SAMPLES = [
  {
    name: "a red circle and a blue square",
    draw(pen) {
      pen.fillStyle = "red";
      disc(pen, 75, 80, 48);
      pen.fillStyle = "blue";
      pen.fillRect(152, 152, 76, 76);
    },
    questions: ["What color is the circle?", "Where is the blue square?", "How many shapes are there?"],
  },
  {
    name: "a yellow star on black",
    background: "black",
    draw(pen) {
      pen.fillStyle = "yellow";
      star(pen, 128, 132, 84);
    },
    questions: ["What is this?", "What color is the background?", "Is there a circle?"],
  },
];

function disc(pen, x, y, radius) {
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.fill();
}

function star(pen, x, y, radius) {
  pen.beginPath();
  for (let point = 0; point < 10; point += 1) {
    const [angle, length] = [(point * Math.PI) / 5 - Math.PI / 2, point % 2 ? radius * 0.4 : radius];
    pen.lineTo(x + length * Math.cos(angle), y + length * Math.sin(angle));
  }
  pen.fill();
}

export async function makeSample(sample) {
  const canvas = makeCanvas(256, 256, sample.background);
  sample.draw(canvas.getContext("2d"));
  return new Picture(sample.name, await encode(canvas, "image/png", sample.name), 256, 256, "");
}
