// Starts `fathom serve` on a free port and talks to it.
import { spawn } from 'node:child_process';
import { createRequire } from 'node:module';
import net from 'node:net';
import path from 'node:path';

const require = createRequire(path.join(process.env.FATHOM_NPM, 'index.js'));
export const OpenAI = require('openai').OpenAI ?? require('openai');

// A running server. Flags beyond the defaults go into `flags`.
export async function startServer(flags = []) {
  const child = spawn(
    process.env.FATHOM_BINARY,
    ['serve', '--host', '127.0.0.1', '--port', '0', '--max-model-len', '4096',
     '--max-num-seqs', '64', ...flags],
    { stdio: ['ignore', 'ignore', 'pipe'] });
  let log = '';
  const exited = new Promise((resolve) =>
    child.on('exit', (code, signal) => resolve({ code, signal })));
  const port = await new Promise((resolve, reject) => {
    child.stderr.on('data', (data) => {
      log += data;
      const ready = log.match(/ready at http:\/\/[^:]+:(\d+)/);
      if (ready) resolve(Number(ready[1]));
    });
    child.on('exit', (code) => reject(new Error(`fathom serve ended with ${code}:\n${log}`)));
  });
  const base = `http://127.0.0.1:${port}`;
  return {
    port,
    base,
    child,
    exited,
    log: () => log,
    client: (options = {}) =>
      new OpenAI({ baseURL: base + '/v1', apiKey: 'none', maxRetries: 0, ...options }),
    get: (target) => fetch(base + target),
    post: (target, body) =>
      fetch(base + target, {
        method: 'POST',
        headers: { 'Content-Type': 'application/json' },
        body: typeof body === 'string' ? body : JSON.stringify(body),
      }),
    async stop() {
      child.kill('SIGTERM');
      return exited;
    },
  };
}

// One value of the metrics page; `labels` is text that must occur in the line.
export async function metric(server, name, labels = '') {
  const page = await (await server.get('/metrics')).text();
  for (const line of page.split('\n')) {
    if (line.startsWith(name + '{') && line.includes(labels)) return Number(line.split(' ').pop());
  }
  throw new Error(`no metric ${name} ${labels}`);
}

// Waits until nothing runs and the pools are back to what they were.
export async function expectIdle(server, before = { blocks: 0, slots: 0 }) {
  let state;
  for (let i = 0; i < 300; ++i) {
    state = await pools(server);
    if (state.running === 0 && state.waiting === 0 && state.blocks === before.blocks &&
        state.slots === before.slots) return;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  throw new Error('pools did not return: ' + JSON.stringify(state));
}

export async function pools(server) {
  return {
    running: await metric(server, 'vllm:num_requests_running'),
    waiting: await metric(server, 'vllm:num_requests_waiting'),
    blocks: await metric(server, 'vllm:pool_units_used', 'pool="blocks"'),
    slots: await metric(server, 'vllm:pool_units_used', 'pool="slots"'),
  };
}

// Sends bytes and collects what comes back until the server closes or `quiet` ms pass in silence.
export function raw(port, bytes, { quiet = 3000, end = false } = {}) {
  return new Promise((resolve) => {
    let received = '';
    const socket = net.connect(port, '127.0.0.1', () => (end ? socket.end(bytes) : socket.write(bytes)));
    socket.setTimeout(quiet, () => socket.destroy());
    socket.on('data', (data) => (received += data));
    socket.on('error', () => {});
    socket.on('close', () => resolve(received));
  });
}

export const chat = (text, extra = {}) => ({
  model: 'demo',
  messages: [{ role: 'user', content: text }],
  temperature: 0,
  max_tokens: 24,
  ...extra,
});

// The whole of a streamed chat: text, finish reason, usage, number of chunks.
export async function collect(stream) {
  const result = { content: '', reasoning: '', finish: null, usage: null, chunks: 0, roles: 0 };
  for await (const chunk of stream) {
    ++result.chunks;
    if (chunk.usage) result.usage = chunk.usage;
    for (const choice of chunk.choices) {
      if (choice.delta.role) ++result.roles;
      result.content += choice.delta.content ?? '';
      result.reasoning += choice.delta.reasoning_content ?? '';
      if (choice.finish_reason) result.finish = choice.finish_reason;
    }
  }
  return result;
}
