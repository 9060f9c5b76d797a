// Everything that a request may ask for.
import { useState } from "preact/hooks";
import { keepKey, type Model } from "./api";
import type { Settings } from "./store";

const MINIMA = { temperature: 0, topP: 0, seed: undefined, maxTokens: 1, drafts: 1 };
type NumberName = keyof typeof MINIMA;

interface ControlsProps {
  settings: Settings;
  model: Model | null;
  change: (changes: Partial<Settings>) => void;
}

export function Controls({ settings, model, change }: ControlsProps) {
  const number = (name: NumberName, label: string, step: string, placeholder = "default") => (
    <label>
      {label}
      <input
        type="number"
        inputMode="decimal"
        min={MINIMA[name]}
        step={step}
        placeholder={placeholder}
        value={settings[name]}
        onInput={(event) => change({ [name]: event.currentTarget.value })}
      />
    </label>
  );
  return (
    <section class="controls" aria-label="Settings of the request">
      <div class="numbers-row">
        {number("temperature", "Temperature", "0.1")}
        {number("topP", "Top-p", "0.05")}
        {number("maxTokens", "Max tokens", "1")}
        {number("seed", "Seed", "1")}
      </div>
      <Switch
        label={model && !model.speculation ? "Speculation (the server has none)" : "Speculation"}
        isOff={model !== null && !model.speculation}
        value={settings.speculation}
        set={(speculation) => change({ speculation })}
      />
      {model?.speculation &&
        settings.speculation &&
        number("drafts", "Most drafts per forward (k)", "1", `${model.speculation.num_speculative_tokens}`)}
      <Switch label="Mark tokens" value={settings.marks} set={(marks) => change({ marks })} />
      <Text
        label="System prompt"
        value={settings.system}
        set={(system) => change({ system })}
        hint="You are brief."
      />
      <Text
        label="Tools (JSON)"
        isJson
        value={settings.tools}
        set={(tools) => change({ tools })}
        hint='[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]'
      />
      <Text
        label="JSON schema of the answer"
        isJson
        value={settings.schema}
        set={(schema) => change({ schema })}
        hint='{"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}'
      />
    </section>
  );
}

function Switch(props: {
  label: string;
  isOff?: boolean;
  value: boolean;
  set: (value: boolean) => void;
}) {
  return (
    <label class="switch">
      <input
        type="checkbox"
        role="switch"
        disabled={props.isOff}
        checked={props.value && !props.isOff}
        onChange={(event) => props.set(event.currentTarget.checked)}
      />
      <span>{props.label}</span>
    </label>
  );
}

function Text(props: {
  label: string;
  value: string;
  hint: string;
  isJson?: boolean;
  set: (value: string) => void;
}) {
  const problem = props.isJson ? problemOf(props.value) : null;
  return (
    <details class="text-setting" open={props.value !== ""}>
      <summary>
        {props.label}
        {props.value && <span class="in-use">{problem ? "not JSON" : "in use"}</span>}
      </summary>
      <textarea
        aria-label={props.label}
        aria-invalid={problem !== null}
        class={props.isJson ? "code" : ""}
        spellcheck={!props.isJson}
        rows={4}
        placeholder={props.hint}
        value={props.value}
        onInput={(event) => props.set(event.currentTarget.value)}
      />
      {problem && <p class="invalid">{problem}</p>}
    </details>
  );
}

function problemOf(text: string): string | null {
  if (!text.trim()) return null;
  try {
    JSON.parse(text);
    return null;
  } catch (error) {
    return (error as Error).message;
  }
}

/** Asks for the key that the server wants; it is kept until the tab is closed. */
export function KeyForm({ given, refused }: { given: () => void; refused: boolean }) {
  const [key, setKey] = useState("");
  return (
    <form
      class="key"
      onSubmit={(event) => {
        event.preventDefault();
        keepKey(key.trim());
        given();
      }}
    >
      <label>
        {refused ? "The server refuses that API key; try another" : "This server asks for an API key"}
        <input
          type="password"
          autocomplete="off"
          required
          value={key}
          ref={(box) => box?.focus()}
          onInput={(event) => setKey(event.currentTarget.value)}
        />
      </label>
      <button type="submit">Use this key</button>
      <p class="hint">It stays in this tab, and is sent to this server alone.</p>
    </form>
  );
}
