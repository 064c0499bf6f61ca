// Search in a page opened from the disk: browsers start no Worker there, so its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.started = new Promise((start, fail) => {
        frame.onload = () => {
          frame.onload = null;
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inside.document.createElement("script");
          script.src = new URL(url, location).href;
          script.onload = () => start(inside);
          script.onerror = () => fail(new Error(`cannot load ${script.src}`));
          inside.document.head.append(script);
        };
      });
      document.body.append(frame);
    }

    async postMessage(data) {
      (await this.started).dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
