import { useCallback, useEffect, useRef, useState } from "preact/hooks";

/** A function that draws the component anew, at most once per frame: answers are filled in place. */
export function useRedraw(): () => void {
  const [, set] = useState(0);
  const due = useRef(0);
  useEffect(() => () => cancelAnimationFrame(due.current), []);
  return useCallback(() => {
    if (due.current) return;
    due.current = requestAnimationFrame(() => {
      due.current = 0;
      set((n) => n + 1);
    });
  }, []);
}

/** Scroll to the end while the reader is there; `isOn` is false where there is nothing to follow. */
export function useFollow<T extends HTMLElement>(isOn: boolean) {
  const box = useRef<T>(null);
  const atEnd = useRef(true);
  useEffect(() => {
    const element = box.current!;
    const note = () => {
      atEnd.current = element.scrollHeight - element.scrollTop - element.clientHeight < 60;
    };
    element.addEventListener("scroll", note, { passive: true });
    return () => element.removeEventListener("scroll", note);
  }, []);
  useEffect(() => {
    if (isOn && atEnd.current) box.current!.scrollTop = box.current!.scrollHeight;
  });
  return { box, toEnd: () => void (atEnd.current = true) };
}
