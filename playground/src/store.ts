// Conversations and settings, in this browser only.
import type { Answer } from "./answer";
import type { Picture } from "./pictures";

export type Turn =
  | { role: "user"; text: string; pictures?: Picture[] }
  | { role: "assistant"; answer: Answer }
  | { role: "tool"; id: string; text: string };

export interface Conversation {
  id: string;
  title: string;
  turns: Turn[];
}

export interface Settings {
  model: string;
  system: string;
  temperature: string;
  topP: string;
  seed: string;
  maxTokens: string;
  /** Most drafts that a forward verifies. */
  drafts: string;
  tools: string;
  schema: string;
  speculation: boolean;
  marks: boolean;
  theme: "auto" | "light" | "dark";
}

export const DEFAULTS: Settings = {
  model: "",
  system: "",
  temperature: "",
  topP: "",
  seed: "",
  maxTokens: "",
  drafts: "",
  tools: "",
  schema: "",
  speculation: true,
  marks: true,
  theme: "auto",
};

const CONVERSATIONS = "atom.conversations";
const SETTINGS = "atom.settings";
const MOST = 100;

export function newConversation(): Conversation {
  // Not `randomUUID`, which only secure origins have.
  const id = `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
  return { id, title: "New conversation", turns: [] };
}

export function loadConversations(): Conversation[] {
  const found = read<Conversation[]>(CONVERSATIONS, []);
  for (const turn of found.flatMap((each) => each.turns)) {
    if (turn.role === "assistant" && turn.answer.state === "running") turn.answer.state = "stopped";
  }
  return found;
}

/** Keep a conversation as the latest, beside those that other tabs have kept; returns all. */
export function keepConversation(conversation: Conversation): Conversation[] {
  return save([conversation, ...othersThan(conversation)]);
}

/** Returns those that are left. */
export function removeConversation(conversation: Conversation): Conversation[] {
  return save(othersThan(conversation));
}

/** Call back with all conversations when another tab has changed them; returns how to end that. */
export function onOtherTab(changed: (all: Conversation[]) => void): () => void {
  const listen = (event: StorageEvent) => {
    if (event.key === CONVERSATIONS || event.key === null) changed(loadConversations());
  };
  addEventListener("storage", listen);
  return () => removeEventListener("storage", listen);
}

function othersThan(conversation: Conversation): Conversation[] {
  return read<Conversation[]>(CONVERSATIONS, []).filter((each) => each.id !== conversation.id);
}

/** Keep what fits; the oldest go first. */
function save(all: Conversation[]): Conversation[] {
  let kept = all.filter((each) => each.turns.length).slice(0, MOST);
  for (;;) {
    try {
      localStorage.setItem(CONVERSATIONS, JSON.stringify(kept));
      return kept;
    } catch {
      if (!kept.length) return kept;
      kept = kept.slice(0, -1);
    }
  }
}

export function loadSettings(): Settings {
  return { ...DEFAULTS, ...read<Partial<Settings>>(SETTINGS, {}) };
}

export function saveSettings(settings: Settings): void {
  localStorage.setItem(SETTINGS, JSON.stringify(settings));
}

function read<T>(key: string, otherwise: T): T {
  try {
    return (JSON.parse(localStorage.getItem(key) ?? "null") as T | null) ?? otherwise;
  } catch {
    return otherwise;
  }
}
