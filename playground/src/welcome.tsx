// What a person sees first: what is special here, and what to try.
import type { Model } from "./api";

const SUGGESTIONS = [
  "Explain in three sentences how speculative decoding stays exact.",
  "Count from one to thirty, in words, separated by commas.",
  "Write a Python function that merges two sorted lists, with a test.",
];

interface WelcomeProps {
  model: Model | null;
  ask: (text: string) => void;
  race: () => void;
}

export function Welcome({ model, ask, race }: WelcomeProps) {
  return (
    <div class="welcome">
      {model && (model.speculation ? <Speculation model={model} race={race} /> : <NoDrafts />)}
      <h3>Ask something</h3>
      <ul>
        {SUGGESTIONS.map((text) => (
          <li>
            <button type="button" disabled={!model} onClick={() => ask(text)}>
              {text}
            </button>
          </li>
        ))}
      </ul>
    </div>
  );
}

function Speculation({ model, race }: { model: Model; race: () => void }) {
  return (
    <>
      <h2>Several tokens per forward, and the same text</h2>
      <p>
        {drafting(model)} guesses what comes next. One forward of the model checks all guesses and
        keeps those that it would have written itself. Each token shows how it came:
      </p>
      <dl class="origins">
        <dt>
          <span class="token draft">accepted</span>
        </dt>
        <dd>guessed, and confirmed: it took no forward of its own</dd>
        <dt>
          <span class="token corrected">corrected</span>
        </dt>
        <dd>the guess was wrong, and the model’s own token stands here</dd>
        <dt>
          <span class="token sampled">sampled</span>
        </dt>
        <dd>written by the model where nothing was guessed</dd>
      </dl>
      <button type="button" class="primary" onClick={race}>
        Race it: speculation on against off
      </button>
    </>
  );
}

function NoDrafts() {
  return (
    <>
      <h2>Every token takes a forward of its own</h2>
      <p>
        This server runs without speculation, so all tokens are sampled by the model. Started with{" "}
        <code>--method</code> it drafts several at once, and this page shows which came how.
      </p>
    </>
  );
}

/** What makes a server's drafts, as the beginning of a sentence. */
export function drafting({ speculation }: Model): string {
  const { method, lookup, num_speculative_tokens: most } = speculation!;
  const who = `${method}${lookup ? " with a lookup in the text so far" : ""}`;
  return `A draft (${who}, up to ${most} tokens)`;
}
