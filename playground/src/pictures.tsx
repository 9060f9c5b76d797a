// Pictures in messages: taken from files, the clipboard or a drop, and shown.

export interface Picture {
  name: string;
  /** A data URL. */
  url: string;
  /** Where its tokens are in the prompt, first and number; before the server has said it, none. */
  tokens?: [number, number];
}

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

/** Those of the files that models see. */
export function picturesIn(files: FileList | null | undefined): File[] {
  return [...(files ?? [])].filter((file) => TYPES.includes(file.type));
}

export function readPicture(file: File): Promise<Picture> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name, url: reader.result as string });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

export function PictureButton({ add }: { add: (files: File[]) => void }) {
  return (
    <label class="picture-button" title="Pictures; paste and drop work, too">
      <span class="unseen">Add pictures</span>
      <span aria-hidden="true">＋</span>
      <input
        type="file"
        accept={TYPES.join(",")}
        multiple
        onChange={(event) => {
          add(picturesIn(event.currentTarget.files));
          event.currentTarget.value = "";
        }}
      />
    </label>
  );
}

export function Pictures(props: { pictures: Picture[]; remove?: (picture: Picture) => void }) {
  if (!props.pictures.length) return null;
  return (
    <ul class="pictures" aria-label="Pictures">
      {props.pictures.map((picture) => (
        <li>
          <figure>
            <img src={picture.url} alt={picture.name} />
            {picture.tokens && <figcaption>{place(picture.tokens)}</figcaption>}
          </figure>
          {props.remove && (
            <button
              type="button"
              aria-label={`Remove ${picture.name}`}
              onClick={() => props.remove!(picture)}
            >
              ×
            </button>
          )}
        </li>
      ))}
    </ul>
  );
}

function place([first, count]: [number, number]): string {
  return `${count} tokens, ${first} to ${first + count - 1} of the prompt`;
}
