// Facts planted at ten depths of long documents, asked for over HTTP, one request a fact.
//
//   node needles.cjs --url http://127.0.0.1:8000 --tokens 8192 --documents 3 --at-least 27
//     --depths N (10)  --concurrency N (4)  --seed N (1)
//     --distinct 1: no two facts of a document share a word of their names (0)
//     --texts DIR: documents are stretches of a folder of text (tests/needles/texts), the kind the demo
//       model was trained on; otherwise paragraphs of the bundled document in random order
//     --dump DIR: write each document and its questions to a file for ask.py instead of asking (the
//       server only counts tokens)
// Prints a table and fails when fewer answers than --at-least are exactly right, or when the cache
// blocks in use are ever not what the sequences' lengths need, to the page.
'use strict';
const fs = require('fs');
const path = require('path');
const {root, factPattern, randomSource, facts, corpus, plant} = require('./documents.cjs');

const options = {
  url: '', tokens: 8192, documents: 3, depths: 10, concurrency: 4, seed: 1, 'at-least': 0, distinct: 0, texts: '',
  dump: '',
};
for (let i = 2; i < process.argv.length; i += 2) {
  const name = process.argv[i].replace(/^--/, '');
  if (!(name in options)) throw new Error(`unknown option ${process.argv[i]}`);
  options[name] = typeof options[name] === 'string' ? process.argv[i + 1] : Number(process.argv[i + 1]);
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

// Paragraphs of the bundled document in random order, again and again, about `tokens` tokens.
async function paragraphs(random, tokens) {
  const text = fs.readFileSync(path.join(root, 'models/documents/debian-faq.txt'), 'utf8');
  const all = text.split(/\n\s*\n/).map((p) => p.trim())
    .filter((p) => p.length > 80 && !factPattern.test(p));
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

// A stretch of the texts, from a random place, of 99 to 100 % of `tokens` tokens.
async function stretch(random, texts, tokens) {
  const at = random.below(texts.length);
  const rest = `${texts.slice(at)}\n\n${texts.slice(0, at)}`;
  let length = 0;
  for (let count = 0; count <= 0.99 * tokens;) {
    if (length >= rest.length) throw new Error(`${options.texts} has only ${count} tokens`);
    length += tokens - count;  // a token has a character or more, on the whole
    ({count} = await post('/tokenize', {prompt: rest.slice(0, length)}));
  }
  return rest.slice(0, length);
}

async function main() {
  const random = randomSource(options.seed + options.tokens);
  const texts = options.texts ? corpus(options.texts) : '';
  const tasks = [];
  for (let d = 0; d < options.documents; ++d) {
    const planted = facts(random, options.depths, options.distinct === 1);
    const bodyTokens = options.tokens - 30 * options.depths - 40;
    let document;
    if (texts) {
      document = plant(await stretch(random, texts, bodyTokens), planted);
    } else {
      const body = await paragraphs(random, bodyTokens);
      // Fact i stands at depth (i + 0.5) / depths of the text.
      planted.forEach((fact, i) => {
        const at = Math.floor(((i + 0.5) / options.depths) * (body.length - options.depths)) + i;
        body.splice(at, 0, fact.fact);
      });
      document = body.join('\n\n');
    }
    planted.forEach((fact, i) => tasks.push({document: d, depth: i, ...fact, text: `${document}\n\n${fact.question}`}));
    if (options.dump) {
      fs.writeFileSync(path.join(options.dump, `${options.tokens}-${d + 1}.json`),
        JSON.stringify({tokens: options.tokens, text: document, facts: planted}));
    }
  }
  if (options.dump) return;

  const request = (task) => ({
    messages: [{role: 'user', content: task.text}], temperature: 0, max_tokens: 40,
  });
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
