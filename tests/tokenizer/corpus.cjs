// The oracle test's corpus: real text from a Debian machine, generated text of many scripts, and
// every edge around added tokens and Unicode that we know of. Deterministic for a given machine.
const fs = require('node:fs');
const path = require('node:path');
const zlib = require('node:zlib');

// mulberry32
function makeRandom(seed) {
  return function random(n) {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return Math.floor((((t ^ (t >>> 14)) >>> 0) / 4294967296) * n);
  };
}

function* walk(folder) {
  let names;
  try {
    names = fs.readdirSync(folder, {withFileTypes: true});
  } catch {
    return;
  }
  names.sort((a, b) => (a.name < b.name ? -1 : 1));
  for (const entry of names) {
    const full = path.join(folder, entry.name);
    if (entry.isDirectory()) yield* walk(full);
    else if (entry.isFile()) yield full;
  }
}

// Up to `limit` bytes of files that `accept` likes, at most 64 KiB of each.
function realText(folders, accept, limit) {
  const parts = [];
  let total = 0;
  for (const folder of folders) {
    for (const file of walk(folder)) {
      if (total >= limit) return parts;
      if (!accept(file)) continue;
      let bytes;
      try {
        bytes = fs.readFileSync(file);
        if (file.endsWith('.gz')) bytes = zlib.gunzipSync(bytes);
      } catch {
        continue;
      }
      bytes = bytes.subarray(0, 65536);
      if (bytes.length < 64) continue;
      parts.push(bytes);
      total += bytes.length;
    }
  }
  return parts;
}

const SENTENCES = [
  '深度求索发布了新的语言模型，支持一百万个标记的上下文。', '他在2024年3月15日说：“缓存命中率是95.2%。”',
  '臺灣的繁體中文也要測試，包括標點符號「」『』、破折號——以及省略號……', '日本語のテキストにはひらがな、カタカナ、漢字が混ざっています。',
  'コンピューター・サイエンスの「ヴァージョン２．０」は１２３４５円です。', 'ﾊﾝｶｸｶﾀｶﾅも忘れずに。ゝゞヽヾ々〆ヶ゛゜',
  '한국어 문장은 띄어쓰기가 있고, 조사가 붙습니다. 안녕 👩‍👩‍👧 漢字!', 'ᄒᆞᆫ글 옛한글 ㅋㅋㅋ ㅠㅠ',
  'هذا نص عربي للاختبار، مع أرقام ١٢٣٤٥ وتشكيل: مُحَمَّدٌ.', 'سلام دنیا، نیم‌فاصله می‌خواهم ۱۲۳',
  'שלום עולם, טקסט בעברית עם ניקוד: שָׁלוֹם', 'यह हिन्दी में एक वाक्य है, संख्या १२३ के साथ।', 'বাংলা ভাষায় একটি বাক্য।',
  'தமிழ் எழுத்துக்கள் க்ஷ ஸ்ரீ', 'ภาษาไทยไม่มีช่องว่างระหว่างคำ ๑๒๓', 'မြန်မာဘာသာ စာကြောင်း', 'Быстрая лиса перепрыгнула через ленивую собаку; №5 — ёлка.',
  'Η γρήγορη αλεπού, ΆΈΉΊ ΐΰ.', 'Tiếng Việt có nhiều dấu: ặ ệ ỗ ợ ữ.', 'Zażółć gęślą jaźń; Příliš žluťoučký kůň; ſtraße ǅ ﬁ',
  'Combining: e\u0301 a\u0308\u0323 n\u0303\u0303\u0303 \u0301alone \u20dd Z\u0351\u036b\u0343', 'ქართული ენა, Հայերեն, አማርኛ ፩፪፫, ᠮᠣᠩᠭᠣᠯ \u180e ᠪᠢᠴᠢᠭ',
  '🎉🔥 ❤️ 🇩🇪🇯🇵 👍🏽 🧑‍💻 1️⃣2️⃣ ☺︎ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ✈️🚀', '∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, ½ ⅓ ² ₃ Ⅻ ①② ㊿ 𝟙𝟚 𝔄𝕭𝒸',
  "I'm sure they'll don't we've it's O'Neill's 'quoted' \"double\" `tick`", 'The quick brown fox (jumps) over the lazy dog. 3.14159, $1,234.56; 50% off!',
  'snake_case camelCase PascalCase SCREAMING_CASE kebab-case x+=1; a->b::c<d>&&e||!f', '#include <vector>\nint main() {\n\treturn 0;  // done\n}\n',
  '{"key": [1, 2.5e-10, null, true], "s": "\\u00e9\\n"}', 'https://example.org/a/b?c=d&e=%20f#g user@host.tld ~/.config/x.y',
];
const SPACES = [' ', '  ', '   ', '\t', '\t\t', '\n', '\n\n', '\r\n', '\r\n\r\n', '\r', ' \n', '\n ', ' \r\n \t', '\u00a0',
  '\u3000', '\u2003\u2003', '\u0085', '\u2028', '\u2029', '\u200b', '\u200d', '\ufeff', '\u180e', '\u000b', '\u000c', '\u0000', '\u00ad', '\u2060'];
const WORDS = ['a', 'I', 'the', 'don\'t', 'tokenizer', 'Zürich', 'naïve', 'x1y2', '中', '中文', 'カタカナ', 'ひら', '・', 'ー', '゛', '\u3099', '\u3040',
  '漢字かな', '한글', 'عربي', '7', '42', '123', '1234567', '١٢٣', '½', '!', '!!', '...', '!a', '$x', '—', '“', '<', '>', '｜', '▁', '_', '\u0301',
  '\u0327\u0301', '👩‍👩‍👧', '❤️', '\u{10ffff}', '\u{e000}', '\u{31350}', '\u{2ebf0}', '\u{1fae8}', '\u0378', '\u{1171e}', '\ufffd', '\u0130', 'ſ'];

function generated(random, bytes, parts, spaceChance) {
  let text = '';
  while (text.length < bytes) {
    text += parts[random(parts.length)];
    if (random(100) < spaceChance) text += random(3) ? ' ' : SPACES[random(SPACES.length)];
  }
  return Buffer.from(text);
}

// Added tokens adjacent, nested, cut short, with spaces and line breaks, inside words.
function addedTokenEdges(random, tokens, count) {
  const documents = [];
  const token = () => tokens[random(tokens.length)];
  const cut = (s) => s.slice(0, 1 + random(s.length));
  for (const t of tokens) documents.push(Buffer.from(`${t}x ${t} \n${t}${t}a${t}\r\n ${t}  ${t}`));
  for (let i = 0; i < count; i++) {
    let text = '';
    for (let k = 1 + random(12); k > 0; k--) {
      const t = token();
      switch (random(10)) {
        case 0: text += t; break;
        case 1: text += t + token(); break;
        case 2: text += cut(t); break;
        case 3: text += t.slice(random(t.length)); break;
        case 4: { const at = random(t.length); text += t.slice(0, at) + token() + t.slice(at); break; }
        case 5: text += SPACES[random(SPACES.length)] + t + SPACES[random(SPACES.length)]; break;
        case 6: text += WORDS[random(WORDS.length)] + t + WORDS[random(WORDS.length)]; break;
        case 7: text += cut(t) + t; break;
        case 8: text += t.toUpperCase() + t.replace(/[｜▁]/g, (c) => (c === '｜' ? '|' : '_')); break;
        default: text += WORDS[random(WORDS.length)] + SPACES[random(SPACES.length)]; break;
      }
    }
    documents.push(Buffer.from(text));
  }
  return documents;
}

// Every code point of planes 0 and 1 and a sample of the rest, among neighbours of each class.
function codePoints() {
  const documents = [];
  let text = '';
  for (let c = 0; c < 0x110000; c++) {
    if (c >= 0xd800 && c < 0xe000) continue;
    if (c >= 0xac00 && c < 0xd7a4 && c % 13) continue;
    if (c >= 0x4e00 && c < 0x9f00 && c % 13) continue;
    if (c >= 0x20000 && c % 29 && (c & 0xffff) < 0xfff0 && !(c >= 0x2a6d0 && c < 0x2a710)) continue;
    const s = String.fromCodePoint(c);
    text += `${s}a ${s}${s}!${s}\n${s}中${s}1${s}`;
    if (text.length > 20000) {
      documents.push(Buffer.from(text));
      text = '';
    }
  }
  documents.push(Buffer.from(text));
  return documents;
}

function randomBytes(random, count, size) {
  const documents = [];
  for (let i = 0; i < count; i++) {
    const bytes = Buffer.alloc(1 + random(size));
    const kind = random(4);
    for (let k = 0; k < bytes.length; k++) {
      // Uniform; mostly continuation and lead bytes; near-valid UTF-8; ASCII with stray bytes.
      bytes[k] = kind === 0 ? random(256) : kind === 1 ? 0x80 + random(128)
        : kind === 2 ? [0xe4, 0xb8, 0xad, 0xf0, 0x9f, 0x98, 0xc3, 0xed, 0xa0, 0x20][random(10)]
        : random(20) ? 32 + random(95) : random(256);
    }
    documents.push(bytes);
  }
  return documents;
}

function longRuns(random) {
  const documents = [];
  const runs = ['a', 'ab', ' ', '\n', '\r\n', ' \n', '1', '9876543210', '中', '中国人民', 'あ', 'ア・', '!', '=', '-', 'é', 'e\u0301', '\u0301', '\u200d',
    '👩‍', 'ا', '한', '\u0000', '\u0378', '\t', '_a', "'s", '\u3000', '<', '<｜', 'xyzzy', '\u{1f600}'];
  for (const run of runs) {
    for (const length of [1, 2, 3, 4, 7, 31, 32, 95, 96, 97, 98, 300, 5000]) {
      documents.push(Buffer.from(run.repeat(length)));
      documents.push(Buffer.from('x' + run.repeat(length) + 'y'));
    }
  }
  for (let n = 0; n < 40; n++) {  // one piece, no pattern
    let text = '';
    for (let k = 20 + random(3000); k > 0; k--) text += 'etaoinshrdlu'[random(12)];
    documents.push(Buffer.from(text));
  }
  documents.push(Buffer.from('abcdefghij'.repeat(30000)));
  return documents;
}

// All documents: an array of Buffers.
exports.buildCorpus = function buildCorpus(addedTokens) {
  const random = makeRandom(20240607);
  const text = (f) => !/\.(gz|png|svg|jpg|gif|ico|pdf|woff2?|pyc|so|a|bin)$/.test(f);
  const localeOf = (f) => /\/man\/(ja|ko|zh_CN|zh_TW|ru|fa|de|fr|pl|uk)\//.test(f) && f.endsWith('.gz');
  const documents = [
    ...realText(['/usr/share/common-licenses'], text, 300e3),
    ...realText(['/usr/share/doc'], (f) => text(f) && !f.endsWith('copyright'), 600e3),
    ...realText(['/usr/share/man'], localeOf, 1200e3),
    ...realText(['/usr/share/i18n/locales'], text, 1200e3),
    ...realText(['/usr/share/perl', '/usr/lib/x86_64-linux-gnu/perl-base'], (f) => /\.(pm|pl)$/.test(f), 800e3),
    ...realText(['/usr/lib/python3', '/usr/lib/python3.11', '/usr/share/python3'], (f) => f.endsWith('.py'), 800e3),
  ];
  const real = documents.reduce((n, d) => n + d.length, 0);
  for (let i = 0; i < 40; i++) documents.push(generated(random, 30000, SENTENCES, 50));
  for (let i = 0; i < 60; i++) documents.push(generated(random, 4000, WORDS, 40));
  for (let i = 0; i < 20; i++) documents.push(generated(random, 2000, SPACES.concat(['a', '中', '1', '!']), 10));
  for (const s of SENTENCES) documents.push(Buffer.from(s));
  documents.push(...addedTokenEdges(random, addedTokens, 6000));
  documents.push(...codePoints());
  documents.push(...randomBytes(random, 300, 2000));
  documents.push(...longRuns(random));
  documents.push(Buffer.alloc(0));
  return {documents, real};
};
