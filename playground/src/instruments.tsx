// What only an engine that speculates can show: where tokens came from, and what that saved.
import { perForward, speed, type Answer, type Forward, type Numbers } from "./answer";
import { CORRECTED, SAMPLED, describe, styleOf, type Origin } from "./origins";

export function Instruments({ answer }: { answer: Answer | null }) {
  const numbers = answer?.numbers;
  return (
    <section class="instruments" aria-label="Measurements of the latest answer">
      <dl class="dials">
        <Dial name="tokens per forward" value={numbers && fixed(perForward(numbers), 2)} strong />
        <Dial name="tokens per second" value={numbers && fixed(speed(numbers), 1)} />
        <Dial name="first token" value={numbers && milliseconds(numbers.first)} />
      </dl>
      <Forwards recent={answer?.recent ?? []} />
      <Legend numbers={numbers ?? null} />
      <Positions numbers={numbers ?? null} />
    </section>
  );
}

function Dial(props: { name: string; value: string | null | undefined; strong?: boolean }) {
  return (
    <div class={props.strong ? "dial strong" : "dial"}>
      <dt>{props.name}</dt>
      <dd>{props.value ?? "–"}</dd>
    </div>
  );
}

/** A column for each of the latest forwards, a cell for each of its tokens. */
function Forwards({ recent }: { recent: Forward[] }) {
  const shown = recent.slice(-48);
  const most = Math.max(4, ...shown.map((each) => each.origins.length));
  const cell = 40 / most;
  return (
    <figure class="forwards">
      <figcaption>Latest forwards, a column each</figcaption>
      <svg viewBox="0 0 288 40" preserveAspectRatio="none" role="img" aria-label={said(shown)}>
        {shown.map(({ origins }, x) =>
          origins.map((origin, y) => (
            <rect
              class={`cell ${styleOf(origin)}`}
              x={x * 6}
              y={40 - (y + 1) * cell}
              width={5}
              height={Math.max(cell - 1, 1)}
            />
          )),
        )}
      </svg>
    </figure>
  );
}

function said(shown: Forward[]): string {
  if (!shown.length) return "No forwards yet";
  return `Tokens of the latest forwards: ${shown.map((each) => each.origins.length).join(", ")}`;
}

/** How each origin is drawn, and its share. */
function Legend({ numbers }: { numbers: Numbers | null }) {
  const counts = numbers?.byOrigin ?? {};
  const sources = Object.keys(counts).filter((each) => each !== SAMPLED && each !== CORRECTED);
  const origins = [SAMPLED, ...(sources.length ? sources : ["draft"]), CORRECTED];
  return (
    <table class="legend">
      <caption>How tokens came</caption>
      <tbody>
        {origins.map((origin) => (
          <tr>
            <th scope="row" title={describe(origin)}>
              <span class={`token ${styleOf(origin)}`}>{label(origin)}</span>
            </th>
            <td data-origin={origin}>{counts[origin] ?? 0}</td>
            <td>{share(counts[origin] ?? 0, numbers?.tokens ?? 0)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function label(origin: Origin): string {
  if (origin === SAMPLED || origin === CORRECTED) return origin;
  return origin === "draft" ? "accepted draft" : `accepted, ${origin}`;
}

function Positions({ numbers }: { numbers: Numbers | null }) {
  const verified = numbers?.verified ?? [];
  return (
    <table class="positions">
      <caption>Drafts accepted, by position</caption>
      <tbody>
        {verified.map((count, i) => (
          <tr>
            <th scope="row">{i + 1}</th>
            <td>
              <meter min={0} max={1} value={numbers!.accepted[i]! / count}>
                {share(numbers!.accepted[i]!, count)}
              </meter>
            </td>
            <td>{share(numbers!.accepted[i]!, count)}</td>
            <td>
              {numbers!.accepted[i]} of {count}
            </td>
          </tr>
        ))}
        {verified.length === 0 && (
          <tr>
            <td class="none">No drafts verified yet.</td>
          </tr>
        )}
      </tbody>
    </table>
  );
}

/** One line about a finished answer. */
export function summary(numbers: Numbers): string {
  const parts = [`${numbers.tokens} tokens`, `${numbers.forwards} forwards`];
  const [ratio, rate, first] = [perForward(numbers), speed(numbers), numbers.first];
  if (ratio !== null) parts.push(`${ratio.toFixed(2)} per forward`);
  if (rate !== null) parts.push(`${rate.toFixed(1)} tokens/s`);
  if (first !== null) parts.push(`first after ${milliseconds(first)}`);
  const cached = numbers.usage?.prompt_tokens_details.cached_tokens;
  if (cached) parts.push(`${cached} of ${numbers.usage!.prompt_tokens} prompt tokens cached`);
  return parts.join(" · ");
}

export function milliseconds(value: number | null): string | null {
  if (value === null) return null;
  return value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(2)} s`;
}

function fixed(value: number | null, digits: number): string | null {
  return value === null ? null : value.toFixed(digits);
}

function share(part: number, whole: number): string {
  return whole ? `${Math.round((100 * part) / whole)} %` : "–";
}
