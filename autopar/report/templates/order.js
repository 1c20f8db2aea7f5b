const UNITS = {"": 1, "%": 0.01, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1, "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15};
const sortKey = text => {
  const cell = text.trim(), match = /^([-+]?[\d.,]+(?:e[-+]?\d+)?)\s*([a-zA-Z%]*)$/.exec(cell);
  if (match && match[2] in UNITS) return parseFloat(match[1].replace(/,/g, "")) * UNITS[match[2]];
  return cell.toLowerCase();
};
const inOrder = (a, b) => {
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return a < b ? -1 : a > b ? 1 : 0;
};
