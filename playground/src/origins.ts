// How tokens came: which words, which style, and how text is matched with the tokens it is from.
import type { Step } from "./api";

/** `sampled`, `corrected`, or the source of an accepted draft; null is unknown. */
export type Origin = string;

export interface Piece {
  text: string;
  origin: Origin | null;
}

export const SAMPLED = "sampled";
export const CORRECTED = "corrected";

/** The style of an origin: all draft models share one. */
export function styleOf(origin: Origin): string {
  if (origin === SAMPLED || origin === CORRECTED) return origin;
  if (origin === "lookup" || origin === "suffix" || origin === "grammar") return origin;
  return "draft";
}

export function describe(origin: Origin): string {
  if (origin === SAMPLED) return "sampled: no draft stood here";
  if (origin === CORRECTED) return "corrected: a draft was refused here";
  return `accepted from ${origin}`;
}

export function originsOf(step: Step): Origin[] {
  const accepted = step.num_accepted ?? 0;
  const last = accepted < (step.num_drafts ?? 0) ? CORRECTED : SAMPLED;
  return step.tokens.map((_, i) => (i < accepted ? (step.source ?? "draft") : last));
}

/** Matches an answer's text, which leaves markers out, with the tokens that it was cut from. */
export class Aligner {
  private pending: Piece[] = [];
  private raw = "";

  add(step: Step): void {
    const origins = originsOf(step);
    step.tokens.forEach((text, i) => this.pending.push({ text, origin: origins[i]! }));
    this.raw += step.tokens.join("");
  }

  /** The pieces of a text, each of one token. */
  take(text: string): Piece[] {
    const start = this.raw.indexOf(text);
    if (start < 0) return [{ text, origin: null }];
    this.cut(start);
    return this.cut(text.length);
  }

  private cut(length: number): Piece[] {
    const taken: Piece[] = [];
    this.raw = this.raw.slice(length);
    while (length > 0) {
      const first = this.pending[0]!;
      const text = first.text.slice(0, length);
      if (text) taken.push({ text, origin: first.origin });
      first.text = first.text.slice(length);
      length -= text.length;
      if (!first.text) this.pending.shift();
    }
    return taken;
  }
}
