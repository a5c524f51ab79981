// Numbers as people read them.

export function ms(value) {
  if (value === null || value === undefined) return "";
  if (value >= 60000) return `${Math.floor(value / 60000)} min ${Math.round((value % 60000) / 1000)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(value >= 10000 ? 1 : 2)} s`;
  return `${value >= 100 ? Math.round(value) : value.toFixed(1)} ms`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${at && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
}

export const percent = (part, whole) => (whole ? Math.round((100 * part) / whole) : 0);

export const number = (value) => value.toLocaleString("en");

export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor((sorted.length - 1) / 2)];
}

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

export const sum = (values) => values.reduce((total, each) => total + each, 0);

// Of an axis from 0 to `total` ms: at most seven [ms, label], at 1, 2 or 5 times a power of ten.
export function ticks(total) {
  const unit = 10 ** Math.floor(Math.log10(total / 6));
  const step = unit * [1, 2, 5, 10].find((times) => times * unit >= total / 6);
  const [divisor, name] = total >= 1000 ? [1000, "s"] : [1, "ms"];
  const label = (value) => (value ? `${Number((value / divisor).toPrecision(6))} ${name}` : "0");
  return Array.from({ length: Math.floor(total / step) + 1 }, (_, index) => [index * step, label(index * step)]);
}
