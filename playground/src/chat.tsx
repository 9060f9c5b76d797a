import { useEffect, useRef, useState } from "preact/hooks";
import { newAnswer, receive, textOf, type Answer } from "./answer";
import { KeyError, imageRanges, type Body, type Model } from "./api";
import { useFollow } from "./live";
import { PictureButton, Pictures, picturesIn, readPicture, type Picture } from "./pictures";
import { SettingError, asCurl, asPython, createBody } from "./request";
import { Welcome } from "./welcome";
import type { Conversation, Settings, Turn } from "./store";
import { AssistantTurn, ToolTurn, UserTurn, wholeText } from "./turns";

interface ChatProps {
  conversation: Conversation;
  settings: Settings;
  /** Null until the server has named its models. */
  model: Model | null;
  keep: (conversation: Conversation) => void;
  announce: (text: string) => void;
  refused: () => void;
  /** A request failed for another reason than its key. */
  failed: () => void;
  race: () => void;
  shown: (answer: Answer) => void;
  redraw: () => void;
}

export function Chat(props: ChatProps) {
  const { conversation, settings, announce, redraw } = props;
  const [draft, setDraft] = useState("");
  const [pictures, setPictures] = useState<Picture[]>([]);
  const [problem, setProblem] = useState<string | null>(null);
  const stop = useRef<AbortController | null>(null);
  const field = useRef<HTMLTextAreaElement>(null);
  const turns = conversation.turns;
  const { box, toEnd } = useFollow<HTMLDivElement>(turns.length > 0);
  const busy = stop.current !== null;
  const sees = props.model?.input_modalities?.includes("image") ?? false;
  // A phone would cover the page with its keyboard.
  const toField = () => matchMedia("(pointer: fine)").matches && field.current?.focus();

  useEffect(() => void toField(), []);
  useEffect(() => () => stop.current?.abort(), []);
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if (event.key === "Escape") stop.current?.abort();
      const isTyping = (event.target as HTMLElement).closest("input, textarea, select") !== null;
      if (event.key === "/" && !isTyping) {
        event.preventDefault();
        field.current?.focus();
      }
    };
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  }, []);

  /** Answer the first `count` turns, in place of what followed them. */
  async function answerTo(history: Turn[]) {
    let body;
    try {
      body = createBody(history, settings);
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      return setProblem(error.message);
    }
    setProblem(null);
    const answer = newAnswer();
    const first = history.find((turn) => turn.role === "user");
    conversation.title = first ? title(first.text || "Pictures") : conversation.title;
    conversation.turns = [...history, { role: "assistant", answer }];
    const controller = new AbortController();
    stop.current = controller;
    toEnd();
    props.keep(conversation);
    props.shown(answer);
    toField();
    announce("The model answers.");
    void place(history, body);
    try {
      await receive(answer, body, controller.signal, redraw);
      announce(`${wholeText(answer)} — the end of the answer.`);
    } catch (error) {
      if (error instanceof KeyError) props.refused();
      else props.failed();
    }
    stop.current = null;
    props.keep(conversation);
    redraw();
  }

  /** Say of each picture which tokens of the prompt it is; what the server refuses the answer says. */
  async function place(history: Turn[], body: Body) {
    const shown = history.flatMap((turn) => (turn.role === "user" ? (turn.pictures ?? []) : []));
    if (!shown.length) return;
    const ranges = await imageRanges(body).catch(() => []);
    shown.forEach((picture, i) => {
      const first = ranges[i]?.[0];
      const count = ranges[i]?.reduce((sum, range) => sum + range[1], 0);
      if (first && count) picture.tokens = [first[0], count];
    });
    props.keep(conversation);
    redraw();
  }

  async function add(files: File[]) {
    const read = await Promise.all(files.map(readPicture));
    setPictures((before) => [...before, ...read]);
    announce(`${read.length} pictures added.`);
  }

  /** Pictures among what was pasted or dropped are taken, where the model sees. */
  function take(event: Event, data: DataTransfer | null) {
    const found = sees ? picturesIn(data?.files) : [];
    if (!found.length) return;
    event.preventDefault();
    void add(found);
  }

  function send() {
    const text = draft.trim();
    if ((!text && !pictures.length) || busy || !props.model) return;
    setDraft("");
    setPictures([]);
    void answerTo([...turns, { role: "user", text, ...(pictures.length && { pictures }) }]);
  }

  async function copy(index: number, what: "text" | "curl" | "python") {
    const answer = (turns[index] as { answer: Answer }).answer;
    let text = textOf(answer.content);
    if (what !== "text") {
      try {
        text = (what === "curl" ? asCurl : asPython)(createBody(turns.slice(0, index), settings));
      } catch (error) {
        if (!(error instanceof SettingError)) throw error;
        return setProblem(error.message);
      }
    }
    announce((await copied(text)) ? "Copied." : "The browser did not let the page copy.");
  }

  return (
    <div
      class="chat"
      onDragOver={(event) => sees && event.preventDefault()}
      onDrop={(event) => take(event, event.dataTransfer)}
    >
      <div class="thread" ref={box} tabIndex={0} role="region" aria-label="Conversation">
        {turns.length === 0 && (
          <Welcome
            model={props.model}
            ask={(text) => void answerTo([{ role: "user", text }])}
            race={props.race}
          />
        )}
        {turns.map((turn, i) => {
          if (turn.role === "tool") return <ToolTurn key={i} text={turn.text} />;
          if (turn.role === "user") {
            return (
              <UserTurn
                key={i}
                text={turn.text}
                pictures={turn.pictures ?? []}
                busy={busy}
                edit={(text) => void answerTo([...turns.slice(0, i), { ...turn, text }])}
              />
            );
          }
          return (
            <AssistantTurn
              key={i}
              answer={turn.answer}
              isLast={i === turns.length - 1}
              busy={busy}
              retry={() => void answerTo(turns.slice(0, i))}
              copy={(what) => void copy(i, what)}
              giveResults={(results) =>
                void answerTo([
                  ...turns,
                  ...turn.answer.calls.map((call, j) => ({
                    role: "tool" as const,
                    id: call.id,
                    text: results[j] ?? "",
                  })),
                ])
              }
            />
          );
        })}
      </div>
      {problem && (
        <p class="problem" role="alert">
          {problem}
        </p>
      )}
      <Pictures
        pictures={pictures}
        remove={(picture) => setPictures(pictures.filter((each) => each !== picture))}
      />
      <form
        class="composer"
        onSubmit={(event) => {
          event.preventDefault();
          send();
        }}
      >
        {sees && <PictureButton add={(files) => void add(files)} />}
        <textarea
          id="composer"
          onPaste={(event) => take(event, event.clipboardData)}
          ref={field}
          rows={Math.min(10, Math.max(2, draft.split("\n").length))}
          aria-label="Message"
          placeholder="Message"
          title="Enter sends, Shift+Enter breaks the line, Esc stops"
          value={draft}
          onInput={(event) => setDraft(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
              event.preventDefault();
              send();
            }
          }}
        />
        {busy ? (
          <button type="button" class="primary" onClick={() => stop.current?.abort()}>
            Stop
          </button>
        ) : (
          <button
            type="submit"
            class="primary"
            disabled={(!draft.trim() && !pictures.length) || !props.model}
          >
            Send
          </button>
        )}
      </form>
    </div>
  );
}

function title(text: string): string {
  const line = text.trim().split("\n")[0]!;
  return line.length > 48 ? `${line.slice(0, 47)}…` : line;
}

/** Copy, also where the page has no secure origin. */
async function copied(text: string): Promise<boolean> {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(
      () => true,
      () => false,
    );
  }
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
