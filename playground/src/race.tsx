// The same request twice, with speculation and without: what is faster, and is the text the same?
import { useRef, useState } from "preact/hooks";
import { newAnswer, receive, speed, textOf, type Answer } from "./answer";
import { KeyError } from "./api";
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

const SAMPLE =
  "Write a Python class for a bank account with deposit, withdraw and transfer, then show how to use it.";

interface RaceProps {
  settings: Settings;
  announce: (text: string) => void;
  refused: () => void;
  /** The answer to measure, as it comes. */
  shown: (answer: Answer) => void;
}

export function Race({ settings, announce, refused, shown }: RaceProps) {
  const [prompt, setPrompt] = useState(SAMPLE);
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
            onInput={(event) => setPrompt(event.currentTarget.value)}
          />
        </label>
        <div class="actions">
          {isRunning ? (
            <button type="button" class="primary" onClick={() => stop.current?.abort()}>
              Stop
            </button>
          ) : (
            <button type="submit" class="primary" disabled={!prompt.trim()}>
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
        <p class={`verdict ${verdict.same ? "same" : "differs"}`}>
          <strong>{verdict.same ? "Same text." : "Different text."}</strong> {verdict.detail}
        </p>
      )}
      <div class="lanes">
        {lanes.map((each) => (
          <section class="lane" aria-label={each.speculation ? "Speculation on" : "Speculation off"}>
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

/** Compare two finished lanes; null when there are none. */
function judge(lanes: Lane[]): { same: boolean; words: string; detail: string } | null {
  const [on, off] = lanes;
  if (!on || !off || on.answer.state !== "done" || off.answer.state !== "done") return null;
  const [one, other] = [whole(on.answer), whole(off.answer)];
  const [fewer, slow, fast] = [
    off.answer.numbers.forwards / on.answer.numbers.forwards,
    speed(off.answer.numbers),
    speed(on.answer.numbers),
  ];
  const gain = slow && fast ? `, and ${(fast / slow).toFixed(2)}× the speed` : "";
  const cost = `${on.answer.numbers.forwards} forwards instead of ${off.answer.numbers.forwards} (${fewer.toFixed(2)}× fewer)${gain}.`;
  if (one === other && on.answer.numbers.tokens === off.answer.numbers.tokens) {
    const detail = `All ${one.length} characters and ${on.answer.numbers.tokens} tokens are equal. ${cost}`;
    return { same: true, words: `Same text. ${detail}`, detail };
  }
  let i = 0;
  while (i < one.length && one[i] === other[i]) i++;
  const detail = `They part after ${i} characters: “${one.slice(i, i + 20)}” and “${other.slice(i, i + 20)}”. ${cost}`;
  return { same: false, words: `Different text. ${detail}`, detail };
}

function whole(answer: Answer): string {
  return JSON.stringify([textOf(answer.reasoning), textOf(answer.content), answer.calls.map((c) => [c.name, c.arguments])]);
}
