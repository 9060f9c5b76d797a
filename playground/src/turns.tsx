// The turns of a conversation.
import { useState } from "preact/hooks";
import { textOf, type Answer, type Call } from "./answer";
import { summary } from "./instruments";
import { Pictures, type Picture } from "./pictures";
import { Tokens } from "./tokens";

export function UserTurn(props: {
  text: string;
  pictures: Picture[];
  busy: boolean;
  edit: (text: string) => void;
}) {
  const [draft, setDraft] = useState<string | null>(null);
  if (draft !== null) {
    const send = () => {
      setDraft(null);
      props.edit(draft);
    };
    return (
      <form class="turn user editing" onSubmit={(event) => (event.preventDefault(), send())}>
        <textarea
          aria-label="Your message"
          rows={Math.min(12, draft.split("\n").length + 1)}
          value={draft}
          ref={(box) => box?.focus()}
          onInput={(event) => setDraft(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Escape") setDraft(null);
            if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
              event.preventDefault();
              send();
            }
          }}
        />
        <div class="actions">
          <button type="submit" disabled={!draft.trim() && !props.pictures.length}>
            Send again
          </button>
          <button type="button" onClick={() => setDraft(null)}>
            Cancel
          </button>
        </div>
      </form>
    );
  }
  return (
    <article class="turn user" aria-label="You">
      <Pictures pictures={props.pictures} />
      {props.text && <p class="text">{props.text}</p>}
      <div class="actions">
        <button type="button" disabled={props.busy} onClick={() => setDraft(props.text)}>
          Edit
        </button>
      </div>
    </article>
  );
}

interface AssistantProps {
  answer: Answer;
  /** The last turn: its calls can be answered. */
  isLast: boolean;
  busy: boolean;
  retry: () => void;
  copy: (what: "text" | "curl" | "python") => void;
  giveResults: (results: string[]) => void;
}

export function AssistantTurn(props: AssistantProps) {
  const { answer, isLast } = props;
  const isRunning = answer.state === "running";
  return (
    <article class="turn assistant" aria-label="The model" aria-busy={isRunning}>
      {answer.reasoning.length > 0 && (
        <details class="reasoning">
          <summary>
            {isRunning && !answer.content.length ? "Reasoning…" : "Reasoning"}
            <span class="count"> {answer.reasoning.length} tokens</span>
          </summary>
          <p class="text">
            <Tokens pieces={answer.reasoning} />
          </p>
        </details>
      )}
      {answer.content.length > 0 && (
        <p class="text">
          <Tokens pieces={answer.content} />
        </p>
      )}
      {isRunning && <span class="cursor" aria-hidden="true" />}
      {answer.calls.length > 0 && (
        <Calls
          calls={answer.calls}
          give={isLast && answer.state === "done" ? props.giveResults : null}
        />
      )}
      {answer.problem && (
        <p class="problem" role="alert">
          {answer.problem}
        </p>
      )}
      <footer>
        <span class="numbers">
          {answer.numbers.tokens > 0 && summary(answer.numbers)}
          {answer.finish === "length" && " · cut at the limit of tokens"}
          {answer.state === "stopped" && " · stopped"}
        </span>
        {!isRunning && (
          <div class="actions">
            <button type="button" disabled={props.busy} onClick={props.retry}>
              Retry
            </button>
            <button type="button" onClick={() => props.copy("text")}>
              Copy
            </button>
            <button type="button" onClick={() => props.copy("curl")}>
              Copy as curl
            </button>
            <button type="button" onClick={() => props.copy("python")}>
              Copy as Python
            </button>
          </div>
        )}
      </footer>
    </article>
  );
}

function Calls(props: { calls: Call[]; give: ((results: string[]) => void) | null }) {
  const [results, setResults] = useState<string[]>([]);
  const all = props.calls.map((_, i) => results[i] ?? "");
  return (
    <form
      class="calls"
      onSubmit={(event) => {
        event.preventDefault();
        props.give?.(all);
      }}
    >
      {props.calls.map((call, i) => (
        <section class="call" aria-label={`Call of ${call.name}`}>
          <h3>
            <span class="verb">calls</span> {call.name}
          </h3>
          <pre>{indented(call.arguments)}</pre>
          {props.give && (
            <label>
              Result
              <textarea
                rows={2}
                value={all[i]!}
                onInput={(event) =>
                  setResults(all.map((each, j) => (j === i ? event.currentTarget.value : each)))
                }
              />
            </label>
          )}
        </section>
      ))}
      {props.give && (
        <div class="actions">
          <button type="submit">Give {all.length > 1 ? "results" : "the result"}</button>
        </div>
      )}
    </form>
  );
}

function indented(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export function ToolTurn({ text }: { text: string }) {
  return (
    <article class="turn tool" aria-label="Result of a tool">
      <h3>result</h3>
      <pre>{text || "(empty)"}</pre>
    </article>
  );
}

export function wholeText(answer: Answer): string {
  return textOf(answer.content) || answer.calls.map((call) => `${call.name}(${call.arguments})`).join("\n");
}
