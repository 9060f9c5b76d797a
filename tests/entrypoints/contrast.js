// The texts of a page whose contrast with what is behind them is below WCAG's 4.5.
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const over = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) {
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
    }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.map((byte) => {
      const share = byte / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const low = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility({ opacityProperty: true })) continue;
    if (element.closest(":disabled")) continue;
    const behind = [];
    for (let one = element; one; one = one.parentElement) {
      behind.unshift(getComputedStyle(one).backgroundColor);
    }
    const back = over(["white", ...behind]);
    const text = over([`rgb(${back})`, getComputedStyle(element).color]);
    const [dark, light] = [luminance(back), luminance(text)].sort((a, b) => a - b);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < 4.5) low.push(`${walker.currentNode.data.trim()}: ${ratio.toFixed(2)}`);
  }
  return low;
}
