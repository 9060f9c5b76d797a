// Text whose tokens show how they came; what stands between Markdown's fences is drawn as code.
import { Component } from "preact";
import { textOf } from "./answer";
import { describe, styleOf, type Piece } from "./origins";

const BLOCK = 64;
const FENCED = /^[ \t]*```.*(?:\n(?![ \t]*```).*)*(?:\n[ \t]*```.*)?/gm;

interface BlockProps {
  pieces: Piece[];
  from: number;
  to: number;
  isCode: boolean;
}

/** Some pieces; drawn once they are there, however many follow. */
class Block extends Component<BlockProps> {
  override shouldComponentUpdate(next: BlockProps): boolean {
    const { pieces, to, isCode } = this.props;
    return next.pieces !== pieces || next.to !== to || next.isCode !== isCode;
  }

  override render({ pieces, from, to, isCode }: BlockProps) {
    const tokens = pieces.slice(from, to).map(({ text, origin }) =>
      origin === null ? (
        text
      ) : (
        <span class={`token ${styleOf(origin)}`} title={describe(origin)}>
          {text}
        </span>
      ),
    );
    return isCode ? <code>{tokens}</code> : tokens;
  }
}

/** Answers are filled in place: the number of pieces says whether there are new ones. */
export const Tokens = ({ pieces }: { pieces: Piece[] }) => (
  <Blocks pieces={pieces} count={pieces.length} />
);

class Blocks extends Component<{ pieces: Piece[]; count: number }> {
  override shouldComponentUpdate(next: { pieces: Piece[]; count: number }): boolean {
    return next.pieces !== this.props.pieces || next.count !== this.props.count;
  }

  override render() {
    return <>{blocksOf(this.props.pieces)}</>;
  }
}

function blocksOf(pieces: Piece[]) {
  const code = [...textOf(pieces).matchAll(FENCED)].map((found) => ({
    start: found.index,
    end: found.index + found[0].length,
  }));
  const isCode = pieces.map(() => false);
  let place = 0;
  pieces.forEach(({ text }, i) => {
    while (code[0] && code[0].end <= place) code.shift();
    isCode[i] = code[0] !== undefined && code[0].start <= place;
    place += text.length;
  });
  const blocks = [];
  for (let from = 0, to = 0; from < pieces.length; from = to) {
    while (to < pieces.length && to < from + BLOCK && isCode[to] === isCode[from]) to++;
    blocks.push(<Block key={from} pieces={pieces} from={from} to={to} isCode={isCode[from]!} />);
  }
  return blocks;
}
