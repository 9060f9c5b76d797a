import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { problemOf, type Answer } from "./answer";
import { KeyError, apiKey, listModels, type Model } from "./api";
import { Chat } from "./chat";
import { Controls, KeyForm } from "./controls";
import { Instruments } from "./instruments";
import { useRedraw } from "./live";
import { Race, SAMPLE } from "./race";
import {
  keepConversation,
  loadConversations,
  loadSettings,
  newConversation,
  onOtherTab,
  removeConversation,
  saveSettings,
  type Conversation,
  type Settings,
} from "./store";

const THEMES = ["auto", "light", "dark"] as const;
const THEME_NAMES = { auto: "Auto theme", light: "Light", dark: "Dark" };

export function App() {
  const [settings, setSettings] = useState(loadSettings);
  const [models, setModels] = useState<Model[]>([]);
  const [problem, setProblem] = useState<string | null>(null);
  // How often the server refused a key, or none, since it last took one.
  const [refusals, setRefusals] = useState(0);
  const [view, setView] = useState<"chat" | "race">("chat");
  const [conversations, setConversations] = useState<Conversation[]>(loadConversations);
  const [current, setCurrent] = useState<Conversation>(newConversation);
  const [measured, setMeasured] = useState<Answer | null>(null);
  const [said, setSaid] = useState("");
  // Where the screen is narrow, one side lies over the page.
  const [drawer, setDrawer] = useState<Drawer | null>(null);
  const [racePrompt, setRacePrompt] = useState(SAMPLE);
  const redraw = useRedraw();
  // An answer that still comes to one of these is not kept.
  const removed = useRef(new Set<string>());
  const model = models.find((each) => each.id === settings.model) ?? null;

  const change = useCallback((changes: Partial<Settings>) => {
    setSettings((before) => {
      const after = { ...before, ...changes };
      saveSettings(after);
      return after;
    });
  }, []);

  const connect = useCallback(async () => {
    try {
      const found = await listModels();
      setModels(found);
      setRefusals(0);
      setProblem(null);
      setSettings((before) =>
        found.some((each) => each.id === before.model)
          ? before
          : { ...before, model: found[0]?.id ?? "" },
      );
    } catch (error) {
      if (error instanceof KeyError) setRefusals((n) => n + 1);
      else setProblem(problemOf(error));
    }
  }, []);
  useEffect(() => void connect(), [connect]);
  useEffect(() => onOtherTab(setConversations), []);
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if (event.key === "Escape") setDrawer(null);
    };
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  }, []);
  useEffect(() => {
    document.documentElement.dataset.theme = settings.theme;
  }, [settings.theme]);

  const keep = useCallback((conversation: Conversation) => {
    if (!removed.current.has(conversation.id)) setConversations(keepConversation(conversation));
  }, []);
  const open = (conversation: Conversation) => {
    setCurrent(conversation);
    setMeasured(latest(conversation));
    setView("chat");
    setDrawer(null);
  };
  const remove = (conversation: Conversation) => {
    removed.current.add(conversation.id);
    setConversations(removeConversation(conversation));
    if (conversation.id === current.id) open(newConversation());
  };
  const shown = useCallback((answer: Answer) => setMeasured(answer), []);
  const refused = useCallback(() => setRefusals((n) => n + 1), []);

  return (
    <div class={`frame ${settings.marks ? "marked" : ""}`}>
      <a class="skip" href="#composer">
        Skip to the message
      </a>
      <header class="bar">
        <DrawerButton name="history" label="Chats" drawer={drawer} set={setDrawer} />
        <h1>
          ATOM <span>playground</span>
        </h1>
        <label class="model">
          <span class="unseen">Model</span>
          <select
            value={settings.model}
            onChange={(event) => change({ model: event.currentTarget.value })}
          >
            {models.length === 0 && <option value="">no model</option>}
            {models.map((model) => (
              <option value={model.id}>{model.id}</option>
            ))}
          </select>
        </label>
        <nav aria-label="Views">
          {(["chat", "race"] as const).map((name) => (
            <button
              type="button"
              aria-current={view === name ? "page" : undefined}
              onClick={() => {
                setView(name);
                setDrawer(null);
              }}
            >
              {name === "chat" ? "Chat" : "Race"}
            </button>
          ))}
        </nav>
        <label class="theme">
          <span class="unseen">Colours</span>
          <select
            value={settings.theme}
            onChange={(event) => change({ theme: event.currentTarget.value as Settings["theme"] })}
          >
            {THEMES.map((theme) => (
              <option value={theme}>{THEME_NAMES[theme]}</option>
            ))}
          </select>
        </label>
        <DrawerButton name="panel" label="Panel" drawer={drawer} set={setDrawer} />
      </header>

      <aside id="history" class={drawer === "history" ? "over" : ""} aria-label="Conversations">
        <button type="button" class="new" onClick={() => open(newConversation())}>
          New conversation
        </button>
        <ul>
          {conversations.map((each) => (
            <li class={each.id === current.id ? "current" : ""}>
              <button type="button" class="open" onClick={() => open(each)}>
                {each.title}
              </button>
              <button
                type="button"
                class="remove"
                aria-label={`Delete ${each.title}`}
                onClick={() => remove(each)}
              >
                ×
              </button>
            </li>
          ))}
        </ul>
        <p class="hint">Kept in this browser only.</p>
      </aside>

      <main inert={drawer !== null}>
        {refusals > 0 && (
          <KeyForm key={refusals} given={() => void connect()} refused={apiKey() !== ""} />
        )}
        {problem && (
          <p class="problem" role="alert">
            {problem}{" "}
            <button type="button" onClick={() => void connect()}>
              Try again
            </button>
          </p>
        )}
        <div class="view" hidden={view !== "chat"}>
          <Chat
            key={current.id}
            conversation={current}
            settings={settings}
            model={model}
            keep={keep}
            announce={setSaid}
            refused={refused}
            failed={connect}
            race={() => setView("race")}
            shown={shown}
            redraw={redraw}
          />
        </div>
        <div class="view" hidden={view !== "race"}>
          <Race
            prompt={racePrompt}
            setPrompt={setRacePrompt}
            settings={settings}
            model={model}
            announce={setSaid}
            refused={refused}
            shown={shown}
          />
        </div>
      </main>

      <aside id="panel" class={drawer === "panel" ? "over" : ""} aria-label="Measurements and settings">
        <Live answer={measured} />
        <details class="drawer" open>
          <summary>Request</summary>
          <Controls settings={settings} change={change} model={model} />
        </details>
      </aside>
      <p class="unseen" role="status" aria-live="polite">
        {said}
      </p>
    </div>
  );
}

type Drawer = "history" | "panel";

function DrawerButton(props: {
  name: Drawer;
  label: string;
  drawer: Drawer | null;
  set: (drawer: Drawer | null) => void;
}) {
  const isOpen = props.drawer === props.name;
  return (
    <button
      type="button"
      class="drawer-button"
      aria-expanded={isOpen}
      aria-controls={props.name}
      onClick={() => props.set(isOpen ? null : props.name)}
    >
      {props.label}
    </button>
  );
}

/** Draws itself while its answer comes. */
function Live({ answer }: { answer: Answer | null }) {
  const redraw = useRedraw();
  useEffect(() => {
    if (answer?.state !== "running") return;
    const timer = setInterval(() => {
      redraw();
      if (answer.state !== "running") clearInterval(timer);
    }, 80);
    return () => clearInterval(timer);
  }, [answer, redraw]);
  return <Instruments answer={answer} />;
}

function latest(conversation: Conversation): Answer | null {
  for (const turn of [...conversation.turns].reverse()) {
    if (turn.role === "assistant") return turn.answer;
  }
  return null;
}
