// What outlives a server: restarts, sudden ends, shared and full folders.
'use strict';
const fs = require('fs');
const path = require('path');
const {execFileSync} = require('child_process');
const {pause} = require('./server.cjs');
const {randomSource} = require('./texts.cjs');

// `fathom cache verify`: every checksum of every file.
function verify(test, folder, what) {
  try {
    execFileSync(test.binary, ['cache', 'verify', folder], {stdio: 'pipe'});
  } catch (error) {
    test.check(false, `${what}: fathom cache verify: ${error.stdout}${error.stderr}`);
  }
}
const files = (folder, suffix) => fs.readdirSync(folder).filter((name) => name.endsWith(suffix));

async function restart(test) {
  const folder = test.folder('disk');
  const flags = ['--max-num-seqs', 4, '--max-model-len', 8192, '--kv-disk-path', folder];
  const texts = await test.texts();
  const talks = [];
  let server = await test.serve(...flags);
  for (const [i, length] of [70, 300, 1031, 2048, 2900].entries()) {
    const prompt = texts.ids(100 + i, length);
    await test.ask(server, {prompt, max_tokens: 8}, `session ${i}`);
    talks.push(prompt);
  }
  // Two turns by chat; what was said in the first is on disk when the second is.
  const chat = {messages: [{role: 'user', content: await texts.string(120, 700)}], max_tokens: 8};
  const said = await test.ask(server, chat, 'the chat');
  test.check(
      await server.stop(), `the first server did not end by itself:\n${server.log.slice(-1000)}`);
  verify(test, folder, 'after the first server');

  server = await test.serve(...flags);
  for (const [i, talk] of talks.entries()) {
    const request = {prompt: [...talk, ...texts.ids(130 + i, 30)], max_tokens: 8};
    const reply = await test.ask(server, request, `session ${i}, restarted`);
    test.check(
        reply.cached >= talk.length - 1 && reply.report.tokens_by_source.disk === reply.cached,
        `session ${i}: ${test.found(reply)}, by source ${
            JSON.stringify(reply.report.tokens_by_source)}`);
    await test.same(request, reply, `session ${i}, restarted`);
  }
  chat.messages.push(
      {role: 'assistant', content: said.content}, {role: 'user', content: 'And then?'});
  const reply = await test.ask(server, chat, 'the chat, restarted');
  test.check(
      reply.cached >= said.usage.prompt_tokens - 1 &&
          reply.report.tokens_by_source.disk === reply.cached,
      `the chat: ${test.found(reply)}, by source ${JSON.stringify(reply.report.tokens_by_source)}`);
  await test.same(chat, reply, 'the chat, restarted');
  const again = await test.ask(server, chat, 'the chat, once more');
  const {device, disk} = again.report.tokens_by_source;
  test.check(
      disk === 0 && device >= reply.cached,
      `what came from disk is not in memory: ` +
          `${test.found(again)}, by source ${JSON.stringify(again.report.tokens_by_source)}`);
}

async function kill(test) {
  const folder = test.folder('disk');
  const random = randomSource(99);
  const texts = await test.texts();
  // Every session's prompt is a beginning of its document, longer every time.
  const documents = Array.from({length: 3}, (_, i) => texts.ids(9900 + i, 6000));
  const lengths = [400, 700, 1000];
  let asked = 0;
  let warm = 0;
  for (let round = 0; round < (test.long ? 60 : 12); ++round) {
    const server =
        await test.serve('--max-num-seqs', 4, '--max-model-len', 8192, '--kv-disk-path', folder);
    let killed = false;
    let heard;
    const some = new Promise((resolve) => (heard = resolve));
    let awaited = 1 + random.below(4);
    const sessions = Promise.all(documents.map(async (document, who) => {
      try {
        while (!killed) {
          const request = {prompt: document.slice(0, lengths[who]), max_tokens: 4};
          const what = `round ${round + 1}, session ${who}, ${lengths[who]} tokens`;
          const reply = await test.ask(server, request, what);
          if (--awaited === 0) heard();
          if (reply.report.tokens_by_source.disk > 0) ++warm;
          if (++asked % 8 === 0) await test.same(request, reply, what);
          lengths[who] = lengths[who] > 2500 ? 400 + random.below(300) :
                                               lengths[who] + 100 + random.below(400);
        }
      } catch (error) {
        if (!killed) throw error;
      }
    }));
    // What a request leaves is written when it has ended.
    await Promise.race([some, sessions]);
    await pause(random.below(300));
    killed = true;
    await server.kill();
    await sessions;
  }
  verify(test, folder, 'after the last kill');
  test.check(files(folder, '.bad').length === 0, `damaged files: ${files(folder, '.bad')}`);
  const server =
      await test.serve('--max-num-seqs', 4, '--max-model-len', 8192, '--kv-disk-path', folder);
  test.check(files(folder, '.tmp').length === 0, `temporaries left: ${files(folder, '.tmp')}`);
  for (const [who, document] of documents.entries()) {
    const request = {prompt: document.slice(0, 1500), max_tokens: 8};
    await test.same(
        request, await test.ask(server, request, `session ${who}, in the end`),
        `session ${who}, in the end`);
  }
  test.note(`${asked} replies, ${warm} of them went on from disk, ${
      files(folder, '.fkv').length} files in the end`);
  test.check(warm > 0, 'no reply went on from disk, so nothing is proven');
}

async function sharedFolder(test) {
  const folder = test.folder('disk');
  const flags = ['--max-num-seqs', 2, '--max-model-len', 8192, '--kv-disk-path', folder];
  const texts = await test.texts();
  const servers = [await test.serve(...flags), await test.serve(...flags)];
  const document = texts.ids(555, 4000);
  let length = 700;
  for (let turn = 0; turn < 4; ++turn, length += 150) {
    const request = {prompt: document.slice(0, length), max_tokens: 6};
    const reply = await test.ask(servers[turn % 2], request, `turn ${turn + 1}`);
    if (turn % 3 === 2) await test.same(request, reply, `turn ${turn + 1}`);
  }
  // What one wrote the other takes in when it has written something itself, once a second: it then
  // knows of every file.
  const theirs = {prompt: texts.ids(556, 1200), max_tokens: 6};
  const before = files(folder, '.fkv').length;
  await test.ask(servers[0], theirs, 'written by one');
  const written = () => files(folder, '.fkv').length;
  for (let i = 0; i < 300 && written() === before; ++i) await pause(100);
  for (let i = 0; i < 60; ++i) {
    await test.ask(servers[1], {prompt: texts.ids(5700 + i, 300), max_tokens: 2}, 'something else');
    await pause(1100);
    if ((await servers[1].metrics()).diskSegments === written()) break;
  }
  const longer = {prompt: [...theirs.prompt, ...texts.ids(580, 20)], max_tokens: 6};
  const taken = await test.ask(servers[1], longer, 'read by the other');
  await test.same(longer, taken, 'read by the other');
  test.check(
      taken.report.tokens_by_source.disk >= 1199,
      `what the other server wrote is not used: ${test.found(taken)}`);
  // Both at once, the same prompts.
  await Promise.all(servers.flatMap((server, i) => [1, 2, 3].map(async (n) => {
    const request = {prompt: texts.ids(560 + n, 900), max_tokens: 6};
    await test.same(
        request, await test.ask(server, request, `server ${i + 1}, prompt ${n}`),
        `server ${i + 1}, prompt ${n}`);
  })));
  verify(test, folder, 'while both run');
  for (const name of files(folder, '.fkv')) fs.rmSync(path.join(folder, name));
  for (const [i, server] of servers.entries()) {
    const request = {prompt: document.slice(0, 2200), max_tokens: 6};
    await test.same(
        request, await test.ask(server, request, `server ${i + 1}, without files`),
        `server ${i + 1}, without files`);
  }
  for (const server of servers) await test.returned(server, 'in the end');
}

async function fullDisk(test) {
  if (test.smallDisk === '') {
    test.note('left out: no tmpfs could be mounted (needs root)');
    return;
  }
  const folder = path.join(test.smallDisk, 'cache');
  const flags = ['--max-num-seqs', 2, '--max-model-len', 8192, '--kv-disk-path', folder];
  const texts = await test.texts();
  let server = await test.serve(...flags);
  for (let i = 0; i < 8; ++i) {
    const request = {prompt: texts.ids(770 + i, 1500), max_tokens: 6};
    const reply = await test.ask(server, request, `prompt ${i}`);
    if (i >= 6) await test.same(request, reply, `prompt ${i}`);
  }
  await test.returned(server, 'with a full disk');
  test.check((await fetch(server.url + '/health')).status === 200, 'not healthy with a full disk');
  const {bavail, bsize} = fs.statfsSync(test.smallDisk);
  test.note(`${files(folder, '.fkv').length} files, ${bavail * bsize} bytes free`);
  test.check(bavail * bsize < 8 * 6 * 130e3, 'the disk never became full, so nothing is proven');
  test.check(await server.stop(), `it did not end by itself:\n${server.log.slice(-1000)}`);
  verify(test, folder, 'a full disk');
  server = await test.serve(...flags);
  test.check(files(folder, '.tmp').length === 0, `temporaries left: ${files(folder, '.tmp')}`);
  // The oldest have made room for the latest.
  const request = {prompt: texts.ids(777, 1500), max_tokens: 6};
  const reply = await test.ask(server, request, 'the last prompt, restarted');
  test.check(reply.report.tokens_by_source.disk > 0, `the last prompt: ${test.found(reply)}`);
  await test.same(request, reply, 'the last prompt, restarted');
}

module.exports = {
  'restart: a server that starts again goes on from the disk': restart,
  'kill: ended at random moments while it writes, it starts again and says what is right': kill,
  'shared folder: two servers at the same time, and files that vanish': sharedFolder,
  'full disk: it costs no text, and the oldest make room for the latest': fullDisk,
};
