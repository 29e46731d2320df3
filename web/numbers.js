// Numbers as people read them.

const whole = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en-GB", { maximumSignificantDigits: 3 });

export const count = (n) => whole.format(n);
export const tokens = (n) => `${whole.format(n)} token${n === 1 ? "" : "s"}`;
export const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)}%`;

/** Bytes in units of 1,000, to three digits. */
export function bytes(n) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (n >= size) return `${short.format(n / size)} ${unit}`;
  }
  return `${n} bytes`;
}
