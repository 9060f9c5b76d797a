// Text whose tokens show how they came.
import { Component } from "preact";
import { describe, styleOf, type Piece } from "./origins";

const BLOCK = 64;

interface BlockProps {
  pieces: Piece[];
  from: number;
  to: number;
}

/** Some pieces; drawn once they are there, however many follow. */
class Block extends Component<BlockProps> {
  override shouldComponentUpdate(next: BlockProps): boolean {
    return next.pieces !== this.props.pieces || next.to !== this.props.to;
  }

  override render({ pieces, from, to }: BlockProps) {
    return pieces.slice(from, to).map(({ text, origin }) =>
      origin === null ? (
        text
      ) : (
        <span class={`token ${styleOf(origin)}`} title={describe(origin)}>
          {text}
        </span>
      ),
    );
  }
}

export function Tokens({ pieces }: { pieces: Piece[] }) {
  const blocks = [];
  for (let from = 0; from < pieces.length; from += BLOCK) {
    const to = Math.min(from + BLOCK, pieces.length);
    blocks.push(<Block key={from} pieces={pieces} from={from} to={to} />);
  }
  return <>{blocks}</>;
}
