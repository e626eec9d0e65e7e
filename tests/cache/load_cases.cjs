// The cache under load: many sequences, small pools, long prompts beside short ones.
'use strict';
const {pause} = require('./server.cjs');
const {randomSource} = require('./texts.cjs');

const kBlock = 256;
const blocksFor = (tokens) => Math.ceil(tokens / kBlock);

async function decodes(test) {
  const streams = 64;
  const tokens = test.long ? 8000 : 200;
  const server = await test.serve(
      '--max-num-seqs', streams, '--max-model-len', 16384,
      ...(test.long ? ['--kv-cache-memory', 650e6] : []));
  const {blocks} = await server.metrics();
  test.check(
      blocks.total >= streams * blocksFor(60 + tokens),
      `${blocks.total} blocks are not enough for this case`);
  const texts = await test.texts();
  let most = 0;
  let steps = 0;
  const unwatch = server.watch(50, (m) => {
    most = Math.max(most, m.blocks.used);
    steps = m.steps;
    // A prompt of 60 tokens and what it may generate.
    test.check(
        m.slots.used <= streams && m.slots.used === m.running,
        `${m.slots.used} slots for ${m.running} sequences`);
    test.check(
        m.blocks.used <= m.running * blocksFor(60 + tokens),
        `${m.blocks.used} blocks for ${m.running} sequences of at most ${60 + tokens} tokens`);
  });
  const replies = await Promise.all(Array.from({length: streams}, async (_, i) => {
    const request = {prompt: texts.ids(3900 + i, 60), max_tokens: tokens, ignore_eos: true};
    const reply = await test.ask(server, request, `stream ${i}`);
    test.check(
        reply.usage.completion_tokens === tokens && reply.finish === 'length',
        `stream ${i}: ${reply.usage.completion_tokens} tokens, ${reply.finish}`);
    return {request, reply};
  }));
  await unwatch();
  test.check(most >= streams, `never more than ${most} blocks were seen in use`);
  test.check(steps < 1.2 * tokens + 100, `${steps} steps for ${tokens} tokens of every stream`);
  test.note(`at most ${most} blocks in use, ${steps} steps`);
  await test.returned(server, 'after the decodes');
  for (const i of test.long ? [0, 17, 63] : [17])
    await test.same(replies[i].request, replies[i].reply, `stream ${i}`);
}

async function oversubscription(test) {
  // What grows beyond the block of head room that admission counts is preempted.
  const server = await test.serve(
      '--max-num-seqs', 12, '--max-model-len', 2048, '--kv-cache-memory', 210e5, '--kv-host-size',
      7e7);
  const {blocks, hostBlocks} = await server.metrics();
  const texts = await test.texts();
  const prefixes = [4300, 4301].map((seed) => texts.ids(seed, 300));
  const count = test.long ? 200 : 24;
  const requests = Array.from({length: count}, (_, i) => {
    const prompt = [...prefixes[i % 2], ...texts.ids(4400 + i, 60 + 7 * (i % 30))];
    return {prompt, max_tokens: 350 + 10 * (i % 11), ignore_eos: true};
  });
  let wanted = 0;  // what is not shared
  for (const {prompt, max_tokens} of requests) wanted += blocksFor(prompt.length + max_tokens) - 1;
  test.check(wanted >= 4 * blocks.total, `${wanted} blocks wanted of ${blocks.total} are too few`);
  // Every one of them, or a part: the cold texts take longest.
  const compared = requests.filter((_, i) => i % (test.long ? 3 : 12) === 0);
  const began = performance.now();
  for (const request of compared) await test.right(request);
  const alone = ((performance.now() - began) / 1000) * (count / compared.length);
  let oldest = 0;
  let highest = 0;
  const unwatch = server.watch(50, (m) => {
    oldest = Math.max(oldest, m.oldest);
    highest = Math.max(highest, m.blocks.used);
    test.check(
        m.blocks.used <= m.blocks.total, `${m.blocks.used} of ${m.blocks.total} blocks in use`);
  });
  const replies =
      await Promise.all(requests.map((request, i) => test.ask(server, request, `request ${i}`)));
  await unwatch();
  // What ended a while ago has moved to the host.
  for (const i of [count - 6, count - 7, count - 8]) {
    const request = {...requests[i], max_tokens: 8};
    await test.same(request, await test.ask(server, request, 'asked again'), 'asked again');
  }
  const end = await server.metrics();
  for (const [i, request] of requests.entries()) {
    test.check(
        replies[i].usage.completion_tokens === request.max_tokens,
        `request ${i}: ${replies[i].usage.completion_tokens} tokens`);
    if (compared.includes(request)) await test.same(request, replies[i], `request ${i}`);
  }
  test.note(
      `${blocks.total} blocks (${highest} used), ${hostBlocks.total} of the host; oldest waiting ${
          oldest.toFixed(1)} s, ` +
      `one after the other cold: ${alone.toFixed(1)} s; ${end.preemptions} preemptions, ${
          end.fromHost} tokens from the host`);
  test.check(
      end.preemptions > 0 && end.fromHost > 0, 'nothing was preempted or came from the host');
  test.check(
      highest >= 0.9 * blocks.total, `memory was never full: ${highest} of ${blocks.total} blocks`);
  test.check(
      oldest < 2 * alone + 2,
      `a request waited ${oldest} s; all of them one after the other take ${alone} s`);
  await test.returned(server, 'after all of it');
}

async function capacity(test) {
  const server =
      await test.serve('--max-num-seqs', 64, '--max-model-len', 4096, '--kv-cache-memory', 840e5);
  const printed = server.log.match(/ blocks +[\d,]+ B .* ([\d,]+) x [\d,]+ B, ([\d,]+) tokens/);
  if (!test.check(printed, `no line about blocks in the log:\n${server.log}`)) return;
  const [units, tokens] = printed.slice(1).map((text) => Number(text.replaceAll(',', '')));
  const {blocks} = await server.metrics();
  test.check(blocks.total === units, `/metrics says ${blocks.total} blocks, the log ${units}`);
  test.check(
      tokens === units * kBlock,
      `${units} blocks are ${units * kBlock} tokens, the log says ${tokens}`);
  const texts = await test.texts();
  // Each needs two blocks, from its prompt on to its end. The second time the cache is full of
  // what the first left.
  for (const round of [0, 1]) {
    const cut = new AbortController();
    const ends = Array.from({length: Math.floor(units / 2) + 2}, (_, i) => {
      const prompt = texts.ids(5000 + 100 * round + i, 300);
      return server.ask({prompt, max_tokens: 212, ignore_eos: true}, {signal: cut.signal})
          .then(() => true, () => false);
    });
    let highest = 0;
    let waiting = 0;
    let ended = false;
    Promise.race(ends).then(() => (ended = true));
    while (!ended && highest < units - 1) {
      const m = await server.metrics();
      if (m.waiting > 0 && m.blocks.used > highest) {
        highest = m.blocks.used;
        waiting = m.waiting;
      }
      await pause(10);
    }
    cut.abort();
    const finished = (await Promise.all(ends)).filter((whole) => whole).length;
    test.note(
        `round ${round + 1}: ${highest} of ${units} blocks in use while ${waiting} requests wait` +
        `${finished > 0 ? `, ${finished} had ended` : ''}`);
    test.check(
        highest >= 0.95 * units,
        `only ${highest} of ${units} blocks were in use while requests waited`);
    await test.returned(server, `round ${round + 1}`);
  }
}

async function fairness(test) {
  const lengths = test.long ? [100000, 458000] : [16000];
  const server =
      await test.serve('--max-num-seqs', 8, '--max-model-len', test.long ? 524288 : 65536);
  const texts = await test.texts();
  for (let n = 0; n < lengths.length; ++n) {
    const length = lengths[n];
    let done = false;
    const request = {prompt: texts.ids(9000 + length, length), max_tokens: 8, ignore_eos: true};
    const long = test.ask(server, request, `${length} tokens`).finally(() => (done = true));
    while (!done && (await server.metrics()).running === 0) await pause(10);
    let longest = 0;
    const unwatch = server.watch(20, (m) => (longest = Math.max(longest, m.step)));
    const ttft = [];
    for (let i = 0; !done; ++i) {
      const short = {prompt: texts.ids(9500 + (i % 1000), 30 + (i % 3) * 100), max_tokens: 4};
      const reply = await test.ask(server, short, `short request ${i}`);
      if (done) break;
      ttft.push(reply.ttft ?? reply.seconds);
      if (i === 3) await test.same(short, reply, 'a short request');
      await pause(test.long ? 200 : 100);
    }
    const reply = await long;
    await unwatch();
    ttft.sort((a, b) => a - b);
    const at = (share) => ttft[Math.min(ttft.length - 1, Math.floor(share * ttft.length))];
    test.note(
        `${length} tokens in ${reply.seconds.toFixed(1)} s; meanwhile ${
            ttft.length} short requests, first token after ` +
        `${at(0.5).toFixed(3)} s (median), ${at(0.99).toFixed(3)} s (99 %); a step takes at most ${
            longest.toFixed(3)} s`);
    if (ttft.length < 5 && 2 * length < 60000) lengths.push(2 * length);  // a fast machine
    else test.check(ttft.length >= 5, `only ${ttft.length} short requests fitted beside it`);
    // The rest of the running step, and the one or two that compute it. The slowest one may have
    // waited for whatever else this machine does, but not for the prompt.
    if (ttft.length >= 5) {
      test.check(
          at(0.5) <= 4 * longest + 0.25,
          `first token after ${at(0.5)} s (median), a step takes ${longest} s`);
      test.check(
          at(0.99) <= 0.5 * reply.seconds + 0.25,
          `first token after ${at(0.99)} s beside a prompt of ${reply.seconds} s`);
    }
    test.check(reply.usage.completion_tokens === 8, `the long request: ${reply.finish}`);
    if (length <= 200000 && test.long) await test.same(request, reply, `${length} tokens`);
  }
}

async function priority(test) {
  const server = await test.serve('--max-num-seqs', 1, '--max-model-len', 4096);
  const texts = await test.texts();
  const order = [];
  const all = [];
  const send = (name, priority, max_tokens) => {
    const request = {prompt: texts.ids(8000 + all.length, 20), max_tokens, ignore_eos: true, priority};
    all.push(test.ask(server, request, name).then(() => order.push(name)));
  };
  send('running', 0, 2000);
  while ((await server.metrics()).running === 0) await pause(5);
  // Each has a connection of its own: only the server can tell that one came before the next.
  // Long enough that their ends are told apart here, too.
  const queue = [['later 1', 1], ['later 2', 1], ['later 3', 1], ['urgent', -1]];
  for (const [i, [name, priority]] of queue.entries()) {
    send(name, priority, 200);
    while (order.length === 0 && (await server.metrics()).waiting <= i) await pause(5);
  }
  if (!test.check(order.length === 0, 'nothing ran for as long as the others took to come')) return;
  await Promise.all(all);
  test.check(order.indexOf('urgent') <= 1, `they ended in this order: ${order.join(', ')}`);
  test.check(
      order.slice(-3).join() === 'later 1,later 2,later 3',
      `they ended in this order: ${order.join(', ')}`);
}

async function cutStreams(test) {
  const random = randomSource(37);
  // 32 blocks on the device, fewer of the host, the rest on disk.
  const server = await test.serve(
      '--max-num-seqs', 2, '--max-model-len', 4096, '--kv-host-size', 12e6, '--kv-disk-path',
      test.folder('disk'));
  const texts = await test.texts();
  const documents = Array.from({length: 8}, (_, i) => texts.ids(3700 + i, 2000));
  for (const prompt of documents) await test.ask(server, {prompt, max_tokens: 2}, 'a document');
  const cutOne = async (i) => {
    const cut = new AbortController();
    const prompt = [
      ...documents[random.below(8)].slice(0, 300 + random.below(1700)),
      ...texts.ids(3800 + i, random.below(300))
    ];
    setTimeout(() => cut.abort(), random.below(500));
    try {
      await server.ask({prompt, max_tokens: 500, ignore_eos: true}, {signal: cut.signal});
    } catch (error) {
      if (error.name !== 'AbortError') throw error;
    }
  };
  let next = 0;
  await Promise.all(Array.from({length: 24}, async () => {
    while (next < 200) await cutOne(next++);
  }));
  await test.returned(server, 'after 200 cut streams');
  // Up and down: what the way up evicted last is in host memory, what it evicted first on disk.
  for (const [n, i] of [0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1, 0].entries()) {
    const request = {prompt: [...documents[i], ...texts.ids(3950 + n, 40)], max_tokens: 12};
    const reply = await test.ask(server, request, `document ${i}`);
    test.check(reply.cached >= 1999, `document ${i}: ${test.found(reply)}`);
    if (n % 8 === 3) await test.same(request, reply, `document ${i}`);
  }
  const m = await server.metrics();
  test.note(`tokens from the host ${m.fromHost}, from disk ${m.fromDisk}`);
  test.check(m.fromHost > 0 && m.fromDisk > 0, 'a tier gave nothing, so nothing is proven');
  await test.returned(server, 'in the end');
}

module.exports = {
  'B39: decodes hold the blocks their lengths need and give them back': decodes,
  'B43: four times more work than memory and a host tier: all of it ends': oversubscription,
  'B50: as many tokens are admitted as the server prints': capacity,
  'fairness: short requests beside a long prompt get their first token at once': fairness,
  'priority: what matters more passes the queue': priority,
  'B37: 200 streams cut at random while tiers move their rows: all units return': cutStreams,
};
