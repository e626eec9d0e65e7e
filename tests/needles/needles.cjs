// Facts planted at ten depths of long documents, asked for over HTTP, one request a fact.
//
//   node needles.cjs --url http://127.0.0.1:8000 --tokens 8192 --documents 3 --at-least 27
//     --depths N (10)  --concurrency N (4)  --seed N (1)
//     --dump DIR: write the requests and their answers to files instead of asking
// Prints a table and fails when fewer answers than --at-least are exactly right, or when the cache
// blocks in use are ever not what the sequences' lengths need, to the page.
'use strict';
const fs = require('fs');
const path = require('path');

const root = path.join(__dirname, '..', '..');
const options = {url: '', tokens: 8192, documents: 3, depths: 10, concurrency: 4, seed: 1, 'at-least': 0, dump: ''};
for (let i = 2; i < process.argv.length; i += 2) {
  const name = process.argv[i].replace(/^--/, '');
  if (!(name in options)) throw new Error(`unknown option ${process.argv[i]}`);
  options[name] = name === 'url' || name === 'dump' ? process.argv[i + 1] : Number(process.argv[i + 1]);
}

// mulberry32: the same documents on every machine.
function randomSource(seed) {
  let state = seed >>> 0;
  const next = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = state;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  return {below: (n) => Math.floor(next() * n), pick: (list) => list[Math.floor(next() * list.length)]};
}

async function post(route, body) {
  const response = await fetch(options.url + route, {
    method: 'POST', headers: {'content-type': 'application/json'}, body: JSON.stringify(body),
    signal: AbortSignal.timeout(3600e3),
  });
  const text = await response.text();
  if (!response.ok) throw new Error(`${route}: ${response.status} ${text.slice(0, 300)}`);
  return JSON.parse(text);
}

// A chat as a stream, put together again: heartbeats keep the connection of a long prefill alive.
async function chat(body) {
  const response = await fetch(options.url + '/v1/chat/completions', {
    method: 'POST', headers: {'content-type': 'application/json'},
    body: JSON.stringify({...body, stream: true, stream_options: {include_usage: true}}),
  });
  if (!response.ok) throw new Error(`chat: ${response.status} ${(await response.text()).slice(0, 300)}`);
  let content = '';
  let usage;
  let rest = '';
  for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + piece).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith('data: ') || line === 'data: [DONE]') continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(JSON.stringify(event.error));
      content += event.choices[0]?.delta?.content ?? '';
      usage = event.usage ?? usage;
    }
  }
  return {content, usage};
}

async function metrics() {
  const text = await (await fetch(options.url + '/metrics')).text();
  const value = (name, label) => {
    const line = text.split('\n').find((l) => l.startsWith(`vllm:${name}{`) && l.includes(label));
    if (!line) throw new Error(`/metrics has no ${name} ${label}`);
    return Number(line.split(' ').pop());
  };
  return {
    blocks: value('pool_units_used', 'pool="blocks"'),
    slots: value('pool_units_used', 'pool="slots"'),
    blockBytes: value('pool_unit_bytes', 'pool="blocks"'),
  };
}

function facts(random, count) {
  const lists = JSON.parse(fs.readFileSync(path.join(root, 'models/demo/needles.json'), 'utf8'));
  const used = new Set();
  const out = [];
  while (out.length < count) {
    const entity = lists.entity.replace('{adjective}', random.pick(lists.adjectives))
      .replace('{noun}', random.pick(lists.nouns));
    if (used.has(entity)) continue;
    used.add(entity);
    const template = lists.templates[out.length % 3];  // English ones; the text is English
    const value = template.value
      .replace(/integer 1000\.\.999999/, () => String(1000 + random.below(999000)))
      .replace(/\{word\}/g, () => random.pick(lists.words))
      .replace(/\{keeper\}/g, () => random.pick(lists.keepers));
    const fill = (text) => text.replace('{entity}', entity).replace('{value}', value);
    out.push({fact: fill(template.fact), question: fill(template.question), answer: fill(template.answer)});
  }
  return out;
}

// Paragraphs of the bundled document in random order, again and again, about `tokens` tokens.
async function paragraphs(random, tokens) {
  const text = fs.readFileSync(path.join(root, 'models/documents/debian-faq.txt'), 'utf8');
  const all = text.split(/\n\s*\n/).map((p) => p.trim())
    .filter((p) => p.length > 80 && !/The access code for|The passphrase of|The keeper of/.test(p));
  const {count} = await post('/tokenize', {prompt: all.join('\n\n')});
  const perCharacter = count / all.join('\n\n').length;
  const out = [];
  let total = 0;
  let order = [];
  while (total < tokens) {
    if (order.length === 0) {
      order = all.slice();
      for (let i = order.length - 1; i > 0; --i) {
        const j = random.below(i + 1);
        [order[i], order[j]] = [order[j], order[i]];
      }
    }
    const paragraph = order.pop();
    out.push(paragraph);
    total += (paragraph.length + 2) * perCharacter;
  }
  return out;
}

async function main() {
  const random = randomSource(options.seed + options.tokens);
  const tasks = [];
  for (let d = 0; d < options.documents; ++d) {
    const planted = facts(random, options.depths);
    const body = await paragraphs(random, options.tokens - 30 * options.depths - 40);
    // Fact i stands at depth (i + 0.5) / depths of the text.
    planted.forEach((fact, i) => {
      const at = Math.floor(((i + 0.5) / options.depths) * (body.length - options.depths)) + i;
      body.splice(at, 0, fact.fact);
    });
    const document = body.join('\n\n');
    planted.forEach((fact, i) => tasks.push({document: d, depth: i, ...fact, text: `${document}\n\n${fact.question}`}));
  }

  const request = (task) => ({
    messages: [{role: 'user', content: task.text}], temperature: 0, max_tokens: 40,
  });
  if (options.dump) {
    tasks.forEach((task, i) => fs.writeFileSync(path.join(options.dump, `${options.tokens}-${i}.json`),
      JSON.stringify({answer: task.answer, request: request(task)})));
    return;
  }
  const blockTokens = 256;
  let highest = 0;
  let live = true;
  const lengths = [];
  const watcher = (async () => {
    while (live) {
      highest = Math.max(highest, (await metrics()).blocks);
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
  })();
  const start = await metrics();
  let right = 0;
  let next = 0;
  const rows = [];
  const began = Date.now();
  await Promise.all(Array.from({length: options.concurrency}, async () => {
    for (;;) {
      const index = next++;
      if (index >= tasks.length) return;
      const task = tasks[index];
      const reply = await chat(request(task));
      const answer = reply.content.trim();
      const ok = answer === task.answer;
      right += ok ? 1 : 0;
      lengths.push(reply.usage.total_tokens);
      rows[index] = `${ok ? 'right' : 'WRONG'}  document ${task.document + 1}  depth ${task.depth + 1}/${options.depths}` +
        `  ${reply.usage.prompt_tokens} tokens  ${ok ? task.answer : `want: ${task.answer}  got: ${answer}`}`;
      if (options.tokens > 100000) console.log(rows[index]);
    }
  }));
  live = false;
  await watcher;
  if (options.tokens <= 100000) rows.forEach((row) => console.log(row));
  const longest = Math.max(...lengths);
  const most = options.concurrency * Math.ceil((longest + 40) / blockTokens);
  // A reply ends a moment before its units are back.
  let end = await metrics();
  for (let i = 0; i < 300 && (end.slots !== 0 || end.blocks !== start.blocks); ++i) {
    await new Promise((resolve) => setTimeout(resolve, 100));
    end = await metrics();
  }
  console.log(`${right} of ${tasks.length} right at about ${options.tokens} tokens in ` +
    `${((Date.now() - began) / 1000).toFixed(1)} s; blocks in use at most ${highest}, ` +
    `${options.concurrency} sequences of ${longest} tokens need ${most}`);
  let failed = right < options['at-least'];
  if (failed) console.log(`fewer than ${options['at-least']} right`);
  if (highest > most || highest < Math.ceil(Math.min(...lengths) / blockTokens) - 1) {
    console.log('blocks in use are not what the lengths need');
    failed = true;
  }
  if (end.slots !== 0 || end.blocks !== start.blocks) {
    console.log(`units not returned: ${end.blocks} blocks, ${end.slots} slots`);
    failed = true;
  }
  process.exit(failed ? 1 : 0);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
