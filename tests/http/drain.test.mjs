// SIGTERM finishes what runs and refuses the rest; a second one ends at once. A lost reader of the
// messages ends nothing.
import assert from 'node:assert/strict';
import net from 'node:net';
import { test } from 'node:test';
import { chat, raw, startServer } from './harness.mjs';

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Resolves, once the first token is there, to the promise of the whole text (in an object: `await`
// would wait for it too).
async function openStream(server, max_tokens) {
  const reply = await server.post('/v1/chat/completions',
                                  chat('Hello', { stream: true, max_tokens, ignore_eos: true }));
  const reader = reply.body.getReader();
  const first = await reader.read();
  let text = Buffer.from(first.value).toString();
  const rest = (async () => {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return text;
      text += Buffer.from(value).toString();
    }
  })();
  return { rest };
}

test('SIGTERM drains', async () => {
  const server = await startServer();
  const running = await openStream(server, 3000);  // seconds, however fast the machine is
  server.child.kill('SIGTERM');
  while ((await server.get('/health')).status !== 503) await pause(10);
  const body = JSON.stringify(chat('x'));
  const refused = await raw(server.port, `POST /v1/chat/completions HTTP/1.1\r\nContent-Length: ${body.length}\r\n\r\n${body}`);
  assert.match(refused, /^HTTP\/1\.1 503 /);
  assert.match(refused, /Connection: close/);
  assert.match(refused, /Retry-After: /);
  const text = await running.rest;
  assert.match(text, /"finish_reason":"length"/);
  assert.match(text, /data: \[DONE\]\n\n$/);
  assert.deepEqual(await server.exited, { code: 0, signal: null });
});

test('a second SIGTERM ends at once', async () => {
  const server = await startServer();
  const running = await openStream(server, 3500);
  const rest = running.rest.catch(() => 'cut');
  server.child.kill('SIGTERM');
  while ((await server.get('/health')).status !== 503) await pause(10);
  server.child.kill('SIGTERM');
  assert.equal((await server.exited).code, 128 + 15);
  assert.doesNotMatch(await rest, /finish_reason":"length/);
});

test('idle connections do not hold the exit back', async () => {
  const server = await startServer();
  const socket = net.connect(server.port, '127.0.0.1');
  socket.on('error', () => {});
  await pause(100);
  assert.deepEqual(await server.stop(), { code: 0, signal: null });
  socket.destroy();
});

test('a server stays when the reader of its messages goes', async () => {
  const server = await startServer(['--log-level', 'debug']);
  server.child.stderr.destroy();
  for (let i = 0; i < 2; ++i) {
    const reply = await server.post('/v1/chat/completions', chat('Hello', { unknown_field: 1 }));
    assert.equal(reply.status, 200);
    await reply.json();
  }
  assert.deepEqual(await server.stop(), { code: 0, signal: null });
});
