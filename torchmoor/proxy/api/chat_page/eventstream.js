// Reads frames of application/vnd.amazon.eventstream from bytes that are divided anywhere.
//
// A frame: total length, headers length, CRC32 of these eight bytes, headers, payload, CRC32 of everything before it.
// All numbers are big-endian. A header: name length (1 byte), name, type, value.

const PRELUDE_BYTES = 12;
const OVERHEAD_BYTES = 16;
const MAX_HEADERS_BYTES = 128 << 10; // AWS's own limits
const MAX_FRAME_BYTES = (24 << 20) + MAX_HEADERS_BYTES + OVERHEAD_BYTES;
const SIZES = { 0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16 }; // of values by type; 6 and 7 begin with their size
const BYTES = 6;
const TEXT = 7;

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit += 1) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});

function crc32(bytes) {
  let value = 0xffffffff;
  for (const byte of bytes) value = CRC_TABLE[(value ^ byte) & 0xff] ^ (value >>> 8);
  return (value ^ 0xffffffff) >>> 0;
}

export class BrokenFrame extends Error {
  name = "BrokenFrame";
}

export class FrameReader {
  #held = new Uint8Array(0); // the beginning of an incomplete frame

  // Returns the frames that these bytes complete, as {headers, payload}, with those headers that are texts.
  feed(bytes) {
    const data = this.#held.length ? joined(this.#held, bytes) : bytes;
    const frames = [];
    let at = 0;
    while (data.length - at >= PRELUDE_BYTES) {
      const length = checkedLength(data.subarray(at, at + PRELUDE_BYTES));
      if (data.length - at < length) break;
      frames.push(readFrame(data.subarray(at, at + length)));
      at += length;
    }
    this.#held = data.slice(at);
    return frames;
  }

  // Throws if the bytes ended within a frame.
  end() {
    if (this.#held.length) throw new BrokenFrame("the stream ended within a frame");
  }
}

function joined(first, second) {
  const both = new Uint8Array(first.length + second.length);
  both.set(first);
  both.set(second, first.length);
  return both;
}

function viewOf(bytes) {
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}

function checkedLength(prelude) {
  const view = viewOf(prelude);
  const [length, headersLength] = [view.getUint32(0), view.getUint32(4)];
  if (crc32(prelude.subarray(0, 8)) !== view.getUint32(8)) throw new BrokenFrame("a frame's lengths are damaged");
  if (length > MAX_FRAME_BYTES || headersLength > MAX_HEADERS_BYTES || length < OVERHEAD_BYTES + headersLength) {
    throw new BrokenFrame("a frame's lengths make no sense");
  }
  return length;
}

function readFrame(frame) {
  const view = viewOf(frame);
  const end = frame.length - 4;
  if (crc32(frame.subarray(0, end)) !== view.getUint32(end)) throw new BrokenFrame("a frame is damaged");
  const payloadAt = PRELUDE_BYTES + view.getUint32(4);
  return { headers: readHeaders(frame.subarray(PRELUDE_BYTES, payloadAt)), payload: frame.slice(payloadAt, end) };
}

function readHeaders(block) {
  const view = viewOf(block);
  const text = new TextDecoder();
  const headers = new Map();
  let at = 0;
  try {
    while (at < block.length) {
      const nameEnd = at + 1 + view.getUint8(at);
      const name = text.decode(block.subarray(at + 1, nameEnd));
      const type = view.getUint8(nameEnd);
      at = nameEnd + 1;
      let size = SIZES[type];
      if (type === BYTES || type === TEXT) {
        size = view.getUint16(at);
        at += 2;
      }
      if (size === undefined || at + size > block.length) throw new RangeError();
      if (type === TEXT) headers.set(name, text.decode(block.subarray(at, at + size)));
      at += size;
    }
  } catch (error) {
    if (error instanceof RangeError) throw new BrokenFrame("a frame's headers are damaged");
    throw error;
  }
  return headers;
}
