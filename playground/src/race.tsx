// The same request twice, with speculation and without: what is faster, and is the text the same?
import { useRef, useState } from "preact/hooks";
import { newAnswer, receive, speed, textOf, type Answer } from "./answer";
import { KeyError, type Model } from "./api";
import { milliseconds, summary } from "./instruments";
import { useRedraw } from "./live";
import { createBody, SettingError } from "./request";
import type { Settings } from "./store";
import { Tokens } from "./tokens";

interface Lane {
  speculation: boolean;
  answer: Answer;
  /** Milliseconds of the whole request, while it runs and after. */
  elapsed: number;
  waits: boolean;
}

export const SAMPLE =
  "Write a Python class for a bank account with deposit, withdraw and transfer, then show how to use it.";

interface RaceProps {
  prompt: string;
  setPrompt: (prompt: string) => void;
  settings: Settings;
  model: Model | null;
  announce: (text: string) => void;
  refused: () => void;
  /** The answer to measure, as it comes. */
  shown: (answer: Answer) => void;
}

export function Race(props: RaceProps) {
  const { prompt, settings, model, announce, refused, shown } = props;
  const [together, setTogether] = useState(false);
  const [lanes, setLanes] = useState<Lane[]>([]);
  const [problem, setProblem] = useState<string | null>(null);
  const stop = useRef<AbortController | null>(null);
  const redraw = useRedraw();

  async function run() {
    const seed = settings.seed.trim() || String(Math.floor(Math.random() * 2 ** 31));
    const maxTokens = settings.maxTokens || "200";
    const salt = `race-${Date.now()}`;
    const pair = [true, false].map((speculation) => lane(speculation));
    let bodies;
    try {
      bodies = pair.map(({ speculation }) => ({
        ...createBody([{ role: "user", text: prompt }], { ...settings, seed, maxTokens, speculation }),
        // Neither finds the prompt of the other, or of an earlier race, in the cache.
        cache_salt: `${salt}-${speculation}`,
      }));
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      return setProblem(error.message);
    }
    setProblem(null);
    setLanes(pair);
    const controller = new AbortController();
    stop.current = controller;
    const go = async (each: Lane, i: number) => {
      const started = performance.now();
      each.waits = false;
      if (each.speculation) shown(each.answer);
      const timer = setInterval(() => {
        each.elapsed = performance.now() - started;
        redraw();
      }, 50);
      try {
        await receive(each.answer, bodies[i]!, controller.signal, redraw);
      } catch (error) {
        if (error instanceof KeyError) refused();
        controller.abort();
      } finally {
        clearInterval(timer);
        each.elapsed = performance.now() - started;
      }
    };
    if (together) await Promise.all(pair.map(go));
    else for (const [i, each] of pair.entries()) if (!controller.signal.aborted) await go(each, i);
    stop.current = null;
    const verdict = judge(pair);
    if (verdict) announce(verdict.words);
    redraw();
  }

  if (model && !model.speculation) {
    return (
      <div class="race">
        <p class="notice">
          <strong>There is nothing to race.</strong> This server runs without speculation; start it
          with <code>--method</code> to compare.
        </p>
      </div>
    );
  }
  const isRunning = stop.current !== null;
  const longest = Math.max(1, ...lanes.map((each) => each.elapsed));
  const verdict = isRunning ? null : judge(lanes);
  return (
    <div class="race">
      <form
        class="race-form"
        onSubmit={(event) => {
          event.preventDefault();
          void run();
        }}
      >
        <label>
          Prompt of the race
          <textarea
            rows={3}
            value={prompt}
            onInput={(event) => props.setPrompt(event.currentTarget.value)}
          />
        </label>
        <div class="actions">
          {isRunning ? (
            <button type="button" class="primary" onClick={() => stop.current?.abort()}>
              Stop
            </button>
          ) : (
            <button type="submit" class="primary" disabled={!prompt.trim() || !model}>
              Race
            </button>
          )}
          <label class="switch">
            <input
              type="checkbox"
              role="switch"
              disabled={isRunning}
              checked={together}
              onChange={(event) => setTogether(event.currentTarget.checked)}
            />
            <span>Both at once</span>
          </label>
          <span class="hint">
            {together
              ? "They share each forward, so their times differ as their forwards do."
              : "One after the other: each has the machine to itself."}
          </span>
        </div>
      </form>
      {problem && (
        <p class="problem" role="alert">
          {problem}
        </p>
      )}
      {verdict && (
        <section class={`verdict ${verdict.same ? "same" : "differs"}`} aria-label="Result">
          <p>
            <strong>{verdict.same ? "Same text." : "Different text."}</strong> {verdict.detail}
          </p>
          <dl>
            {verdict.gain && (
              <div>
                <dt>the speed</dt>
                <dd>{verdict.gain}</dd>
              </div>
            )}
            <div>
              <dt>{verdict.forwards}</dt>
              <dd>{verdict.fewer}</dd>
            </div>
          </dl>
        </section>
      )}
      <div class="lanes">
        {lanes.map((each) => (
          <section class={`lane ${each.speculation ? "on" : "off"}`} aria-label={each.speculation ? "Speculation on" : "Speculation off"}>
            <h2>
              Speculation {each.speculation ? "on" : "off"}
              <span class="time">{each.waits ? "waits" : milliseconds(each.elapsed)}</span>
            </h2>
            <progress max={longest} value={each.elapsed} aria-label="Time" />
            <p class="numbers">{each.answer.numbers.tokens > 0 ? summary(each.answer.numbers) : " "}</p>
            <p class="text">
              <Tokens pieces={each.answer.reasoning} />
              <Tokens pieces={each.answer.content} />
            </p>
            {each.answer.problem && (
              <p class="problem" role="alert">
                {each.answer.problem}
              </p>
            )}
          </section>
        ))}
      </div>
    </div>
  );
}

function lane(speculation: boolean): Lane {
  return { speculation, answer: newAnswer(), elapsed: 0, waits: true };
}

interface Verdict {
  same: boolean;
  detail: string;
  /** Times as fast; null where an answer was too short to time. */
  gain: string | null;
  fewer: string;
  forwards: string;
  /** All of it, for screen readers. */
  words: string;
}

/** Compare two finished lanes; null when there are none. */
function judge(lanes: Lane[]): Verdict | null {
  const [on, off] = lanes;
  if (!on || !off || on.answer.state !== "done" || off.answer.state !== "done") return null;
  const [one, other] = [whole(on.answer), whole(off.answer)];
  const [slow, fast] = [speed(off.answer.numbers), speed(on.answer.numbers)];
  const [few, many] = [on.answer.numbers.forwards, off.answer.numbers.forwards];
  const gain = slow && fast ? `${(fast / slow).toFixed(2)}×` : null;
  const fewer = `${(many / few).toFixed(2)}×`;
  const forwards = `fewer forwards: ${few} instead of ${many}`;
  const same = one === other && on.answer.numbers.tokens === off.answer.numbers.tokens;
  const detail = same ? equality(on.answer) : difference(one, other);
  const words = [
    same ? "Same text." : "Different text.",
    detail,
    gain && `${gain} the speed,`,
    `${fewer} ${forwards}.`,
  ];
  return { same, detail, gain, fewer, forwards, words: words.filter(Boolean).join(" ") };
}

function equality(answer: Answer): string {
  const length = textOf(answer.reasoning).length + textOf(answer.content).length;
  return `All ${length} characters and ${answer.numbers.tokens} tokens are equal.`;
}

function difference(one: string, other: string): string {
  let i = 0;
  while (i < one.length && one[i] === other[i]) i++;
  return `They part after ${i} characters: “${one.slice(i, i + 20)}” and “${other.slice(i, i + 20)}”.`;
}

/** Everything that the model said. */
function whole(answer: Answer): string {
  return JSON.stringify([textOf(answer.reasoning), textOf(answer.content), answer.calls.map((c) => [c.name, c.arguments])]);
}
