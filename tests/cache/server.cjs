// A server process and what the cases ask of it.
'use strict';
const {spawn} = require('child_process');
const path = require('path');

const model = path.join(__dirname, '..', '..', 'models', 'demo');
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const alive = new Set();
process.on('exit', () => alive.forEach((child) => child.kill('SIGKILL')));
for (const signal of ['SIGTERM', 'SIGINT']) process.on(signal, () => process.exit(1));

class Server {
  // Starts `binary serve` with these flags and waits until it is ready.
  static async start(binary, flags) {
    const server = new Server();
    const all = [
      'serve', model, '--host', '127.0.0.1', '--port', '0', '--stall-seconds', '3600',
      '--unhealthy-seconds', '3600', '--max-body-size', '268435456', ...flags
    ];
    const child = spawn(binary, all.map(String), {stdio: ['ignore', 'ignore', 'pipe']});
    alive.add(child);
    server.child = child;
    server.log = '';
    server.exited = new Promise((resolve) => child.on('exit', (code, signal) => {
      alive.delete(child);
      resolve({code, signal});
    }));
    server.url = await new Promise((resolve, reject) => {
      child.stderr.on('data', (data) => {
        server.log = (server.log + data).slice(-65536);
        const ready = server.log.match(/ready at (http:\/\/\S+)/);
        if (ready) resolve(ready[1]);
      });
      server.exited.then(
          (end) =>
              reject(new Error(`the server ended with ${JSON.stringify(end)}:\n${server.log}`)));
    });
    return server;
  }

  // Ends it as an operator would; true when it ended by itself with status 0.
  async stop() {
    this.child.kill('SIGTERM');
    const {code} = await this.exited;
    return code === 0;
  }
  async kill() {
    this.child.kill('SIGKILL');
    await this.exited;
  }

  async post(route, body, signal) {
    const response = await fetch(this.url + route, {
      method: 'POST',
      headers: {'content-type': 'application/json'},
      body: JSON.stringify(body),
      signal,
    });
    const text = await response.text();
    if (!response.ok) throw new Error(`${route}: ${response.status} ${text.slice(0, 300)}`);
    return JSON.parse(text);
  }

  // One greedy request, streamed unless `whole`. Resolves to what the reply says, in one shape for
  // both routes: text (reasoning and content apart as well), logprobs, finish, usage, report (the
  // explain object), ttft in seconds.
  async ask(request, {whole = false, signal} = {}) {
    const chat = request.messages !== undefined;
    const body = {
      temperature: 0,
      ...request,
      logprobs: chat ? true : 0,
      fathom: {explain: true, ...request.fathom}
    };
    if (chat) body.top_logprobs = 0;
    const route = chat ? '/v1/chat/completions' : '/v1/completions';
    const reply = {
      content: '',
      reasoning: '',
      logprobs: [],
      finish: null,
      usage: null,
      report: null,
      ttft: null
    };
    const take = (choice, message) => {
      reply.content += message.content ?? choice.text ?? '';
      reply.reasoning += message.reasoning_content ?? '';
      const logprobs = choice.logprobs;
      if (logprobs?.content) reply.logprobs.push(...logprobs.content.map((each) => each.logprob));
      if (logprobs?.token_logprobs) reply.logprobs.push(...logprobs.token_logprobs);
      reply.finish = choice.finish_reason ?? reply.finish;
    };
    const began = performance.now();
    if (whole) {
      const got = await this.post(route, body, signal);
      take(got.choices[0], got.choices[0].message ?? {});
      reply.usage = got.usage;
      reply.report = got.fathom;
    } else {
      body.stream = true;
      body.stream_options = {include_usage: true};
      for await (const chunk of this.events(route, body, signal)) {
        if (chunk.error) throw new Error(`${route}: ${JSON.stringify(chunk.error)}`);
        const choice = chunk.choices?.[0];
        if (choice) take(choice, choice.delta ?? {});
        if (reply.ttft === null && reply.content + reply.reasoning !== '') {
          reply.ttft = (performance.now() - began) / 1000;
        }
        reply.usage = chunk.usage ?? reply.usage;
        reply.report = chunk.fathom ?? reply.report;
      }
    }
    reply.seconds = (performance.now() - began) / 1000;
    reply.text = reply.reasoning + reply.content;
    reply.cached = reply.usage.prompt_tokens_details.cached_tokens;
    return reply;
  }

  // The events of a stream, parsed.
  async * events(route, body, signal) {
    const response = await fetch(this.url + route, {
      method: 'POST',
      headers: {'content-type': 'application/json'},
      body: JSON.stringify(body),
      signal,
    });
    if (!response.ok) {
      throw new Error(`${route}: ${response.status} ${(await response.text()).slice(0, 300)}`);
    }
    const decoder = new TextDecoder();
    let rest = '';
    for await (const bytes of response.body) {
      rest += decoder.decode(bytes, {stream: true});
      const lines = rest.split('\n');
      rest = lines.pop();
      for (const line of lines) {
        if (line === 'data: [DONE]') return;
        if (line.startsWith('data: ')) yield JSON.parse(line.slice(6));
      }
    }
    throw new Error(`${route}: the stream ended without [DONE]`);
  }

  // The numbers of /metrics that the cases look at.
  async metrics() {
    const page = (await (await fetch(this.url + '/metrics')).text()).split('\n');
    const value = (name, label = '') => {
      const line = page.find((l) => l.startsWith(`vllm:${name}{`) && l.includes(label));
      if (!line) throw new Error(`/metrics has no ${name} ${label}`);
      return Number(line.split(' ').pop());
    };
    const pool = (name) => ({
      used: value('pool_units_used', `pool="${name}"`),
      total: value('pool_units_total', `pool="${name}"`)
    });
    return {
      running: value('num_requests_running'),
      waiting: value('num_requests_waiting'),
      oldest: value('oldest_waiting_seconds'),
      step: value('last_step_seconds'),
      preemptions: value('num_preemptions_total'),
      steps: value('engine_steps_total'),
      blocks: pool('blocks'),
      slots: pool('slots'),
      hostBlocks: pool('host_blocks'),
      fromHost: value('prompt_tokens_by_source_total', 'source="host"'),
      diskSegments: value('cache_disk_segments'),
      fromDisk: value('prompt_tokens_by_source_total', 'source="disk"'),
    };
  }

  // Calls `see` with the metrics every `ms` until the returned function is called.
  watch(ms, see) {
    let live = true;
    let failure = null;
    const loop = async () => {
      while (live) {
        see(await this.metrics());
        await pause(ms);
      }
    };
    // A server that has gone is the case's to report.
    const ended = loop().catch((error) => (failure = error));
    return async () => {
      live = false;
      await ended;
      if (failure !== null) throw failure;
    };
  }
}

module.exports = {Server, pause};
